"""Validation: errors, groups and what cannot be predicted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from energylens.errors import SpecError
from energylens.results import Anchors, BoardAnchor, Infeasible, Measurement, Prediction
from energylens.spec.system import Parallelism
from energylens.validate import kendall_tau, validate

Make = Callable[..., Measurement]
MakePhase = Callable[..., object]
MakePrediction = Callable[..., Prediction]

ANCHORS = Anchors(
    boards=(
        BoardAnchor(
            board_uuid="u", device="h200", idle_w=120, stream_w=600, gemm_tflops=650, gemm_w=690
        ),
    )
)


def test_errors_are_signed_and_in_percent_of_the_measurement(
    make_measurement: Make, make_prediction: MakePrediction, make_phase: MakePhase
) -> None:
    m = make_measurement(latency_s=0.01, energy_j=5.0)
    prediction = make_prediction({"decode": make_phase(0.011, 4.0, spread=0.05)})
    (row,) = validate([m], lambda m, anchors: prediction).rows
    assert row.latency_s.error_pct == pytest.approx(10)
    assert row.energy_j.error_pct == pytest.approx(-20)
    assert row.latency_s.within_interval is False  # 0.01 < 0.011 * 0.95
    assert row.reason is None


def test_summary_of_all_rows_holds_mape_bias_and_coverage(
    make_measurement: Make, make_prediction: MakePrediction, make_phase: MakePhase
) -> None:
    rows = [make_measurement("a", energy_j=5.0), make_measurement("b", energy_j=10.0)]
    # Errors of +20 % and -10 %; the interval of +-15 % covers the second only.
    energies = {"a": 6.0, "b": 9.0}
    result = validate(
        rows,
        lambda m, anchors: make_prediction(
            {"decode": make_phase(0.01, energies[m.record_id], spread=0.15)}
        ),
    )
    (summary,) = result.summary
    assert dict(summary.group) == {}
    assert (summary.n, summary.n_unpredicted) == (2, 0)
    assert summary.energy_mape_pct == pytest.approx(15)
    assert summary.energy_bias_pct == pytest.approx(5)
    assert summary.latency_mape_pct == pytest.approx(0)
    assert summary.energy_coverage_pct == 50
    assert summary.latency_coverage_pct == 100
    assert summary.kendall_tau_energy == 1


def test_anchored_rows_are_predicted_for_their_boards_and_as_typical(
    make_measurement: Make, make_prediction: MakePrediction, make_phase: MakePhase
) -> None:
    def predict(m: Measurement, anchors: Anchors | None) -> Prediction:
        return make_prediction({"decode": make_phase(0.01, 5.0 if anchors else 6.0)})

    m = make_measurement(energy_j=5.0, anchors=ANCHORS)
    own = validate([m], predict)
    assert own.rows[0].energy_j.predicted == 5.0
    assert own.rows[0].energy_j.predicted_typical == 6.0
    assert own.summary[0].energy_mape_pct == pytest.approx(0)
    assert own.summary[0].energy_typical_mape_pct == pytest.approx(20)
    typical = validate([m], predict, ignore_anchors=True)
    assert typical.rows[0].energy_j.predicted == 6.0
    assert typical.rows[0].energy_j.predicted_typical == 6.0


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        ("unknown spec 'x'", "unknown spec 'x'"),
        (Infeasible(reason="does not fit"), "does not fit"),
    ],
)
def test_rows_that_cannot_be_predicted_are_kept_with_the_reason_and_counted(
    make_measurement: Make,
    make_prediction: MakePrediction,
    make_phase: MakePhase,
    outcome: Infeasible | str,
    reason: str,
) -> None:
    good = make_prediction({"decode": make_phase(0.01, 5.0)})
    result = validate(
        [make_measurement("good"), make_measurement("bad")],
        lambda m, anchors: good if m.record_id == "good" else outcome,
    )
    bad = result.rows[1]
    assert bad.reason == reason
    assert (bad.latency_s.predicted, bad.energy_j.predicted_typical) == (None, None)
    assert bad.energy_j.measured == 5.0
    assert (result.summary[0].n, result.summary[0].n_unpredicted) == (2, 1)
    assert result.summary[0].energy_mape_pct == pytest.approx(0)


def test_a_phase_that_the_prediction_lacks_is_a_reason(
    make_measurement: Make, make_prediction: MakePrediction, make_phase: MakePhase
) -> None:
    prediction = make_prediction({"prefill": make_phase()})
    (row,) = validate([make_measurement()], lambda m, anchors: prediction).rows
    assert row.reason == "the prediction holds no decode phase"


def test_what_was_not_measured_has_no_error_but_a_prediction(
    make_measurement: Make, make_prediction: MakePrediction
) -> None:
    m = make_measurement(energy_j=None)
    result = validate([m], lambda m, anchors: make_prediction())
    energy = result.rows[0].energy_j
    assert energy.predicted is not None
    assert (energy.measured, energy.error_pct, energy.within_interval) == (None, None, None)
    assert result.summary[0].energy_mape_pct is None
    assert result.summary[0].energy_coverage_pct is None


def test_groups_are_made_by_fields_degrees_and_columns(
    make_measurement: Make, make_prediction: MakePrediction
) -> None:
    rows = [
        make_measurement("a", parallelism=Parallelism(tp=2), labels={"host_run": "e"}),
        make_measurement("b", parallelism=Parallelism(tp=1), labels={"host_run": "f"}),
        make_measurement("c", parallelism=Parallelism(tp=2), labels={"host_run": "e"}),
    ]
    result = validate(rows, lambda m, anchors: make_prediction(), by=("engine", "tp", "host_run"))
    assert [dict(s.group) for s in result.summary] == [
        {},
        {"engine": "hf", "tp": 2, "host_run": "e"},
        {"engine": "hf", "tp": 1, "host_run": "f"},
    ]
    assert [s.n for s in result.summary] == [3, 2, 1]


def test_unknown_group_fields_are_refused(
    make_measurement: Make, make_prediction: MakePrediction
) -> None:
    with pytest.raises(SpecError, match="--by: unknown field 'enginee'; allowed: device, engine"):
        validate([make_measurement()], lambda m, anchors: make_prediction(), by=("enginee",))


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=30).filter(
        lambda pairs: len({a for a, _ in pairs}) > 1 and len({b for _, b in pairs}) > 1
    )
)
def test_kendall_tau_equals_scipys(pairs: list[tuple[int, int]]) -> None:
    x, y = [a for a, _ in pairs], [b for _, b in pairs]
    assert kendall_tau(x, y) == pytest.approx(stats.kendalltau(x, y).statistic)


@pytest.mark.parametrize("values", [[], [1.0], [2.0, 2.0]])
def test_kendall_tau_needs_two_different_values(values: list[float]) -> None:
    assert kendall_tau(values, values) is None
