"""Validation: errors, groups and what cannot be predicted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from energylens.errors import SpecError
from energylens.results import (
    Anchors,
    BoardAnchor,
    BreakdownRow,
    Infeasible,
    KernelRow,
    Kind,
    Measurement,
    Prediction,
    Source,
)
from energylens.spec.system import Parallelism
from energylens.validate import (
    Validation,
    bias_share_pct,
    compare_kinds,
    error_shares,
    kendall_tau,
    power_mape_pct,
    validate,
)

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


def test_an_invalid_measurement_is_not_compared_and_says_why(
    make_measurement: Make, make_prediction: MakePrediction
) -> None:
    m = make_measurement(defect="not valid as measured: throttled", anchors=ANCHORS)
    result = validate([m], lambda m, anchors: make_prediction())
    assert result.rows[0].reason == "not valid as measured: throttled"
    assert result.rows[0].latency_s.error_pct is None
    assert result.summary[0].n_unpredicted == 1


# ---------------------------------------------------------------- op kinds


def kernel(kind: Kind, latency_s: float, op: str = "k", phase: str = "decode") -> KernelRow:
    return KernelRow(phase=phase, kind=kind, op=op, count=1.0, latency_s=latency_s, share=0.5)


def op(kind: Kind, latency_s: float, phase: str = "decode") -> BreakdownRow:
    return BreakdownRow(
        phase=phase,
        kind=kind,
        op="op",
        count=1,
        latency_s=latency_s,
        energy_j=1.0,
        share=0.5,
        source=Source.MEASURED,
    )


def test_kinds_are_summed_on_both_sides_and_the_longest_is_first() -> None:
    found = compare_kinds(
        [op(Kind.GEMM, 0.006), op(Kind.GEMM, 0.003), op(Kind.MOE, 0.001), op(Kind.IDLE, 9.0)],
        [kernel(Kind.NORM, 0.002), kernel(Kind.GEMM, 0.004), kernel(Kind.GEMM, 0.006, "l")],
    )
    assert [(k.kind, k.measured, k.predicted) for k in found] == [
        (Kind.GEMM, pytest.approx(0.010), pytest.approx(0.009)),
        (Kind.NORM, 0.002, None),
        (Kind.MOE, None, 0.001),
    ]
    assert [k.error_pct for k in found] == [pytest.approx(-10), None, None]


def test_rows_with_kernels_are_compared_by_kind_without_the_laws_of_long_runs(
    make_measurement: Make, make_prediction: MakePrediction
) -> None:
    asked: list[Anchors | None] = []

    def of_kernels(m: Measurement, anchors: Anchors | None) -> Prediction:
        asked.append(anchors)
        return make_prediction()  # a GEMM of 10 ms in decode, of 50 ms in prefill

    rows = [
        make_measurement("a", kernels=(kernel(Kind.GEMM, 0.008),), anchors=ANCHORS),
        make_measurement("b"),
    ]
    first, second = validate(
        rows, lambda m, anchors: make_prediction(), predict_kernels=of_kernels
    ).rows
    assert [(k.kind, k.measured, k.predicted) for k in first.kinds] == [(Kind.GEMM, 0.008, 0.01)]
    assert second.kinds == ()
    assert asked == [ANCHORS]
    validate(
        rows,
        lambda m, anchors: make_prediction(),
        predict_kernels=of_kernels,
        ignore_anchors=True,
    )
    assert asked == [ANCHORS, None]


# ---------------------------------------------------------------- what dominates


def off_by(
    make_measurement: Make,
    make_prediction: MakePrediction,
    make_phase: MakePhase,
    errors: list[tuple[str, float, float]],
) -> Validation:
    """Rows of (spec, error of latency, error of energy), relative."""
    rows = [make_measurement(f"{i}", spec=spec) for i, (spec, _, _) in enumerate(errors)]

    def predict(m: Measurement, anchors: Anchors | None) -> Prediction:
        _, t, e = errors[int(m.record_id)]
        return make_prediction({"decode": make_phase(0.01 * (1 + t), 5.0 * (1 + e))})

    return validate(rows, predict)


def test_shares_say_which_group_holds_the_error(
    make_measurement: Make, make_prediction: MakePrediction, make_phase: MakePhase
) -> None:
    errors = [("a", 0.02, 0.0), ("a", -0.02, 0.0), ("b", 0.12, 0.01), ("a", 0.04, 0.0)]
    rows = off_by(make_measurement, make_prediction, make_phase, errors).rows
    first, second = error_shares(rows, "latency_s", ("phase", "spec"))
    assert dict(first.group) == {"phase": "decode", "spec": "b"}
    assert (first.n, first.rows_pct) == (1, 25)
    assert first.error_pct == pytest.approx(60)
    assert (second.n, second.error_pct) == (3, pytest.approx(40))
    assert error_shares([], "latency_s", ("phase",)) == ()


def test_bias_is_the_part_of_the_squared_error_that_all_rows_share(
    make_measurement: Make, make_prediction: MakePrediction, make_phase: MakePhase
) -> None:
    def share(*errors: float) -> float | None:
        rows = off_by(
            make_measurement, make_prediction, make_phase, [("a", e, 0.0) for e in errors]
        ).rows
        return bias_share_pct(r.latency_s for r in rows)

    assert share(0.05, 0.05) == pytest.approx(100)
    assert share(0.05, -0.05) == pytest.approx(0, abs=1e-9)
    assert share(0.04, 0.02) == pytest.approx(100 * 0.03**2 / 0.001)
    assert share(0.0) is None


def test_power_is_the_error_of_energy_beside_that_of_time(
    make_measurement: Make, make_prediction: MakePrediction, make_phase: MakePhase
) -> None:
    errors = [("a", 0.1, 0.1), ("a", 0.1, 0.0), ("a", 0.0, 0.05)]
    rows = off_by(make_measurement, make_prediction, make_phase, errors).rows
    assert power_mape_pct(rows) == pytest.approx((0 + 100 * (1 - 1 / 1.1) + 5) / 3)
    assert power_mape_pct([]) is None
