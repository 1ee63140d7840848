"""Two measured runs: what is a regression, what is noise, what cannot be compared."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energylens.baseline import BaselineComparison, Verdict, compare_runs
from energylens.errors import SpecError
from energylens.results import Measurement
from energylens.spec.system import Parallelism

Make = Callable[..., Measurement]


def verdicts(found: BaselineComparison) -> dict[tuple[str, str], str]:
    return {(c.phase, c.quantity): str(c.verdict) for c in found.changes}


def compared(make: Make, old: dict[str, object], new: dict[str, object]) -> BaselineComparison:
    return compare_runs([make("old", **old)], [make("new", **new)], tolerance_pct=3.0)


@pytest.mark.parametrize(
    ("factor", "noise", "verdict"),
    [
        (1.00, 0.001, Verdict.UNCHANGED),
        (1.029, 0.001, Verdict.UNCHANGED),
        (1.031, 0.001, Verdict.REGRESSION),
        (1.031, None, Verdict.REGRESSION),
        (1.10, 0.10, Verdict.UNCHANGED),  # beyond the tolerance, and within the noise of both
        (1.20, 0.10, Verdict.REGRESSION),
        (0.96, 0.001, Verdict.IMPROVEMENT),
        (0.90, 0.10, Verdict.UNCHANGED),
    ],
)
def test_worse_beyond_tolerance_and_noise_is_a_regression(
    make_measurement: Make, factor: float, noise: float | None, verdict: Verdict
) -> None:
    found = compared(
        make_measurement,
        {"latency_noise": noise, "energy_noise": noise},
        {
            "latency_s": 0.01 * factor,
            "energy_j": 5.0 * factor,
            "latency_noise": noise,
            "energy_noise": noise,
        },
    )
    assert verdicts(found) == {("decode", "latency_s"): verdict, ("decode", "energy_j"): verdict}
    assert found.regressed is (verdict is Verdict.REGRESSION)
    assert not found.incomplete
    for change in found.changes:
        assert change.change_pct == pytest.approx(100 * (factor - 1))
        if noise is not None:
            assert change.noise_pct == pytest.approx(100 * factor * noise * 2**0.5)


@given(
    old=st.floats(1e-4, 1e3),
    new=st.floats(1e-4, 1e3),
    noises=st.tuples(st.floats(0, 0.5), st.floats(0, 0.5)),
    tolerance=st.floats(0, 20),
)
def test_a_regression_one_way_is_never_one_the_other_way(
    old: float, new: float, noises: tuple[float, float], tolerance: float
) -> None:
    a, b = (
        Measurement(
            record_id=name,
            device="h200",
            engine="hf",
            spec="toy",
            phase="decode",
            mode="eager",
            batch=4,
            prompt_len=512,
            latency_s=latency_s,
            latency_noise=noise,
        )
        for name, latency_s, noise in (("a", old, noises[0]), ("b", new, noises[1]))
    )
    there = compare_runs([a], [b], tolerance_pct=tolerance)
    back = compare_runs([b], [a], tolerance_pct=tolerance)
    assert not (there.regressed and back.regressed)
    if there.regressed:
        assert 100 * (new / old - 1) > tolerance
    assert not compare_runs([a], [a], tolerance_pct=tolerance).regressed


def test_energy_that_the_new_run_lacks_is_no_pass(make_measurement: Make) -> None:
    why = MappingProxyType({"energy_reason": "no permission to read the counter"})
    found = compared(make_measurement, {}, {"energy_j": None, "labels": why})
    assert verdicts(found)["decode", "energy_j"] == "missing"
    assert (found.regressed, found.incomplete) == (False, True)
    (reason,) = (c.reason for c in found.changes if c.reason)
    assert reason == "not in the new run: no permission to read the counter"


def test_energy_that_the_baseline_lacks_is_told(make_measurement: Make) -> None:
    found = compared(make_measurement, {"energy_j": None}, {})
    assert verdicts(found)["decode", "energy_j"] == "not_measured"
    assert (found.regressed, found.incomplete) == (False, False)
    assert [c.reason for c in found.changes] == [None, "not in the baseline"]
    neither = compared(make_measurement, {"energy_j": None}, {"energy_j": None})
    assert [c.reason for c in neither.changes] == [None, "not in the baseline and the new run"]


def test_a_phase_that_the_new_run_lacks_is_no_pass(make_measurement: Make) -> None:
    both = [make_measurement("p", phase="prefill"), make_measurement("d")]
    found = compare_runs(both, both[1:], tolerance_pct=3.0)
    assert verdicts(found) == {
        ("prefill", "latency_s"): "missing",
        ("prefill", "energy_j"): "missing",
        ("decode", "latency_s"): "unchanged",
        ("decode", "energy_j"): "unchanged",
    }
    assert found.incomplete
    more = compare_runs(both[1:], both, tolerance_pct=3.0)
    assert verdicts(more)["prefill", "latency_s"] == "not_measured"
    assert not more.incomplete


def test_a_regression_shows_although_something_else_is_missing(make_measurement: Make) -> None:
    found = compared(make_measurement, {}, {"latency_s": 0.02, "energy_j": None})
    assert (found.regressed, found.incomplete) == (True, True)


def test_invalid_runs_get_no_verdict(make_measurement: Make) -> None:
    found = compared(
        make_measurement, {}, {"latency_s": 0.02, "defect": "not valid as measured: throttled"}
    )
    assert set(verdicts(found).values()) == {"invalid"}
    assert (found.regressed, found.incomplete) == (False, True)
    assert found.changes[0].reason == "new run not valid as measured: throttled"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"spec": "other"}, "spec is toy in the baseline and other in the new run"),
        ({"device": "a6000"}, "device is h200 in the baseline and a6000"),
        ({"engine": "vllm"}, "engine is hf in the baseline and vllm"),
        ({"precision": "fp8"}, "precision is bf16 in the baseline and fp8"),
        ({"mode": "cuda_graph"}, "mode of decode is eager in the baseline and cuda_graph"),
        ({"batch": 8}, "batch is 4 in the baseline and 8"),
        ({"prompt_len": 1024}, "prompt_len is 512 in the baseline and 1024"),
        ({"parallelism": Parallelism(tp=2)}, "tp is 1 in the baseline and 2"),
        ({"parallelism": Parallelism(replicas=2)}, "replicas is 1 in the baseline and 2"),
        ({"context_len": 600.0}, "context_len is 520 in the baseline and 600 in the new run"),
    ],
)
def test_runs_of_different_things_are_refused(
    make_measurement: Make, fields: dict[str, object], told: str
) -> None:
    with pytest.raises(SpecError) as caught:
        same = {"context_len": 520.0, "precision": "bf16"}
        compared(make_measurement, same, same | fields)
    assert str(caught.value).startswith(f"not comparable: {told}")
    assert "; measure the same spec, layout, workload and mode" in str(caught.value)


def test_the_length_of_a_generation_matters_to_requests_only(make_measurement: Make) -> None:
    assert not compared(make_measurement, {"gen_len": 64}, {"gen_len": 128}).regressed
    with pytest.raises(SpecError, match="gen_len is 64 in the baseline and 128"):
        compared(
            make_measurement,
            {"gen_len": 64, "phase": "request"},
            {"gen_len": 128, "phase": "request"},
        )


def test_a_slightly_other_mean_context_is_the_same_work(make_measurement: Make) -> None:
    assert not compared(
        make_measurement, {"context_len": 1088.0}, {"context_len": 1090.5}
    ).regressed


def test_runs_without_a_common_phase_are_refused(make_measurement: Make) -> None:
    with pytest.raises(SpecError, match="baseline holds decode, the new run prefill: no phase"):
        compared(make_measurement, {}, {"phase": "prefill"})


def test_files_of_many_rows_are_refused(make_measurement: Make) -> None:
    rows = [make_measurement("a"), make_measurement("b")]
    with pytest.raises(SpecError, match=r"the new run holds several decode rows \(a, b\)"):
        compare_runs(rows[:1], rows, tolerance_pct=3.0)


def test_another_version_and_other_boards_are_noted_and_compared(make_measurement: Make) -> None:
    found = compared(
        make_measurement,
        {"engine_version": "0.24.0", "labels": MappingProxyType({"board_uuid": "a"})},
        {"engine_version": "0.25.0", "labels": MappingProxyType({"board_uuid": "b"})},
    )
    assert found.notes[0] == "hf 0.24.0 in the baseline, 0.25.0 now"
    assert found.notes[1].startswith("other boards: a in the baseline, b now; ")
    assert set(verdicts(found).values()) == {"unchanged"}
