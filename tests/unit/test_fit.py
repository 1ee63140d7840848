"""Fitting finds again what a made-up calibration was made with.

What the fit returns must be the constants that the simulation of `made_up` was given.
"""

from __future__ import annotations

import csv
import hashlib
import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from made_up import (
    ADDS,
    ATTENTION,
    CAP_W,
    ETA,
    GAP_S,
    GEMMS,
    H200,
    LAUNCH_S,
    LINK_W,
    MAX_MHZ,
    REDUCES,
    SPIN_W,
    STRETCH,
    WAIT_W,
    A,
    B,
    alone,
    board,
    calibration,
    mean,
    provenance,
    sample,
    simulate,
    trial,
    typical,
    write,
)

from energylens.cost.board import Board
from energylens.cost.regress import GaussianProcess
from energylens.errors import CalibrationError
from energylens.fit import FitReport, fit_bundle, load_published, mix_errors
from energylens.graph import Op, make_op
from energylens.schedule import Constants, Worker, kernel_result
from energylens.spec.resources import data_dir
from energylens.store import Sample

for _module in ("sklearn", "scipy", "pandas", "threadpoolctl"):
    pytest.importorskip(_module)


def fit(*folders: Path):
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):  # small matrices: more threads only wait for each other
        return fit_bundle(folders, device=H200, provider="torch", version="1")


@pytest.fixture(scope="module")
def store_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = provenance(module_us=2000.0), provenance("slow", module_us=4000.0)
    return write(tmp_path_factory.mktemp("samples") / "s", calibration(), *runs)


@pytest.fixture(scope="module")
def fitted(store_folder: Path):
    return fit(store_folder)


# ---------------------------------------------------------------- what it was made with


@pytest.mark.parametrize(
    ("law", "truth", "tolerance"),
    [
        ("eta", ETA, 0.03),
        ("compute_scale", 1.0, 0.03),
        ("compute_stretch", STRETCH, 0.006),
        ("gap_s", GAP_S, 0.03e-6),
        ("link_w", LINK_W, 1.0),
        ("cap_fraction", 0.985, 0.001),
        ("spin_w", SPIN_W, 1e-6),
    ],
)
def test_laws_are_found_again(fitted, law: str, truth: float, tolerance: float):
    bundle, _ = fitted
    assert getattr(bundle.laws, law) == pytest.approx(truth, abs=tolerance)


def test_composed_mixes_are_those_that_were_measured(fitted):
    _, report = fitted
    assert len(report.mixes) == 12
    assert np.abs(list(report.mixes.values())).max() < 0.5  # percent


def test_a_bundle_can_be_held_against_mixes_again(fitted, store_folder: Path):
    bundle, report = fitted
    again = mix_errors(bundle, [store_folder], H200)
    assert again.keys() == report.mixes.keys()
    for label, errors in report.mixes.items():
        assert again[label] == pytest.approx(errors, abs=1e-6)


def test_the_same_shape_on_two_boards_gives_one_typical_cost(fitted):
    bundle, _ = fitted
    ops = [*GEMMS, *ATTENTION, *ADDS, *REDUCES]
    for op, cost in zip(ops, bundle.model(H200).costs(ops), strict=True):
        latency_s, power_w = typical(op)
        stretched = latency_s * (1 + STRETCH * cost.compute_share)
        assert cost.latency_s == pytest.approx(stretched, rel=0.01), op
        assert cost.energy_j / cost.latency_s == pytest.approx(power_w, rel=0.01), op


def test_an_op_alone_is_predicted_as_it_was_measured_capped_or_not(fitted):
    bundle, _ = fitted
    models = bundle.kernels
    for uuid in "ab":
        idle, memory, compute, slow = board(uuid)
        own = Board(
            idle_w=idle, memory_power=memory, compute_power=compute, memory_time=slow
        )  # fmt: skip
        for op in [*GEMMS, *ATTENTION, *ADDS]:
            scale = bundle.laws.compute_scale
            (cost,) = models[op.kernel].costs([op], H200, scale, compute_stretch=0.0)
            local_s, local_j = own.localise([cost])
            worker = Worker(idle_w=idle, cap_w=CAP_W, latency_s=local_s, energy_j=local_j)
            laws = Constants(eta=bundle.laws.eta, gap_s=0.0, wait_w=0.0, spin_w=0.0)
            latency_s, energy_j, _ = kernel_result([op], [cost], worker, laws)
            measured_s, measured_w, _ = simulate([op], uuid)
            assert latency_s == pytest.approx(measured_s, rel=0.01), (uuid, op)
            assert energy_j / latency_s == pytest.approx(measured_w, rel=0.01), (uuid, op)


def test_host_times_are_those_of_the_median_host(fitted):
    host = fitted[0].host
    assert host.anchor.module_us == pytest.approx(3000.0)
    assert dict(host.launch_s) == pytest.approx(LAUNCH_S)
    assert dict(host.wait_w) == pytest.approx(WAIT_W)
    assert host.rel_se == 0.05  # never claims less, however well the points agree


def test_spread_of_two_boards_is_widened_for_a_third(fitted):
    spread = fitted[0].spread
    # sqrt(1 + 1/2) for the mean of two, and Student's 95 % point with one degree over the normal's.
    widen = math.sqrt(1.5) * 6.3138 / 1.6449
    eta = fitted[0].laws.eta

    def sd(a: float, b: float) -> float:
        return widen * abs(a - b) / math.sqrt(2)

    _, memory_a, _, slow_a = board("a")
    _, memory_b, _, slow_b = board("b")
    uncapped = [(x.gemm_w - x.idle_w) * (MAX_MHZ / x.gemm_mhz) ** (1 + eta) for x in (A, B)]
    assert spread.idle_w == pytest.approx(sd(126, 118), rel=1e-3)
    assert spread.memory_power == pytest.approx(
        sd(math.log(memory_a), math.log(memory_b)), rel=1e-3
    )
    assert spread.memory_time == pytest.approx(sd(math.log(slow_a), math.log(slow_b)), rel=1e-3)
    assert spread.compute_power == pytest.approx(sd(*map(math.log, uncapped)), rel=1e-3)


def test_typical_board_is_the_geometric_mean(fitted):
    bundle, _ = fitted
    for name in ("idle_w", "stream_w", "gemm_w", "gemm_mhz", "gemv_gbs"):
        assert getattr(bundle.typical, name) == pytest.approx(mean(name)), name
    assert {b.board_uuid for b in bundle.boards} == {"a", "b"}


def test_held_out_errors_are_those_of_leaving_groups_out(fitted):
    bundle, report = fitted
    (gemm_fit,) = (k for k in report.kernels if k.kernel == "gemm")
    model = bundle.kernels["gemm"]
    shapes = np.array([op.shape for _ in "ab" for op in GEMMS])
    weights = [tuple(s) for s in shapes[:, 1:]]
    assert (gemm_fit.points, gemm_fit.groups) == (30, 3)
    for name in ("latency", "power"):
        whole: GaussianProcess = getattr(model, name)
        errors = np.empty(len(whole.y))
        for left_out in set(weights):
            out = np.array([w == left_out for w in weights])
            rest = GaussianProcess(
                x=whole.x[~out], y=whole.y[~out], noise=whole.noise[~out], length=whole.length,
                signal=whole.signal, mean=whole.mean,
            )  # fmt: skip
            errors[out] = whole.y[out] - rest.predict(whole.x[out])[0]
        rms = math.sqrt(float(np.mean(errors**2)))
        # As close as inverting a nearly singular matrix in two ways allows.
        assert getattr(gemm_fit, f"{name}_rms_pct") == pytest.approx(100 * rms, rel=1e-3)
        largest = 100 * float(np.abs(errors).max())
        assert getattr(gemm_fit, f"{name}_max_pct") == pytest.approx(largest, rel=1e-3)
        assert getattr(model, f"{name}_rel_se") == pytest.approx(rms, rel=1e-3)


def test_facts_name_the_samples_that_the_bundle_was_made_of(fitted, store_folder: Path):
    bundle, _ = fitted
    content = (store_folder / "samples.csv").read_bytes()
    assert bundle.facts["samples_sha256"] == hashlib.sha256(content).hexdigest()
    assert bundle.facts["runs"] == ["r", "slow"]
    assert bundle.facts["points"]["gemm"] == 2 * len(GEMMS)
    assert bundle.versions == {"torch": "2.11"}
    assert bundle.power_limit_w == 700.0


def test_noise_of_half_a_percent_moves_predictions_by_no_more(tmp_path: Path):
    rng = random.Random(5)

    def noisy(op: Op) -> Sample:
        latency_s, power_w, clock = simulate([op], "a")
        return sample(
            "op", [op], "a",
            trial(latency_s * math.exp(rng.gauss(0, 0.005)), power_w, clock, latency_rel_se=0.005),
        )  # fmt: skip

    ops = [make_op("hf_add", rows=2**e, width=4096) for e in range(0, 14)]
    bundle, _ = fit(write(tmp_path, map(noisy, ops)))
    for op, cost in zip(ops, bundle.model(H200).costs(ops), strict=True):
        assert cost.latency_s == pytest.approx(typical(op)[0], rel=0.015)
        assert 0 < cost.latency_rel_se < 0.03


# ---------------------------------------------------------------- what cannot be used


def adds(uuids: str = "a", **fields: object) -> list[Sample]:
    return [alone(op, uuids, **fields) for op in ADDS]


def counted(report: FitReport, text: str) -> int:
    return sum(n for reason, n in report.skipped.items() if text in reason)


def test_samples_of_different_power_limits_are_refused_with_both(tmp_path: Path):
    folders = [
        write(tmp_path / f"{w:.0f}", adds(), provenance(power_limit_w=w)) for w in (700.0, 500.0)
    ]
    with pytest.raises(CalibrationError, match=r"700 W.*500 W") as error:
        fit(*folders)
    assert error.value.exit_code == 2
    assert all(str(f) in str(error.value) for f in folders)


def test_readings_of_one_limit_that_differ_by_less_than_a_watt_are_one_limit(tmp_path: Path):
    folders = [
        write(tmp_path / f"{w}", adds(), provenance(power_limit_w=w)) for w in (700.4, 700.6)
    ]
    assert fit(*folders)[0].power_limit_w == pytest.approx(700.5, abs=0.6)


def test_samples_without_any_anchor_are_refused(tmp_path: Path):
    folder = write(tmp_path, adds(), provenance(anchors=None))
    with pytest.raises(CalibrationError, match=r"no run has an anchor.*energylens calibrate"):
        fit(folder)


def test_samples_of_another_device_are_refused(tmp_path: Path):
    folder = write(tmp_path, adds(), provenance(device="a6000"))
    with pytest.raises(CalibrationError, match="a6000, not of h200"):
        fit(folder)


def test_samples_of_another_provider_are_refused(tmp_path: Path):
    folder = write(tmp_path, adds(), provenance(provider="vllm"))
    with pytest.raises(CalibrationError, match=r"no run measured torch's kernels \(found: vllm\)"):
        fit(folder)


def test_collectives_of_different_algorithms_are_refused(tmp_path: Path):
    folders = [
        write(tmp_path / name, adds(), provenance(versions={"nccl_algo": name}))
        for name in ("Ring", "Tree")
    ]
    with pytest.raises(CalibrationError, match="Ring, Tree"):
        fit(*folders)


def test_a_bundle_is_dated_by_its_newest_run(tmp_path: Path):
    folders = [
        write(tmp_path / day, adds(), provenance(time=f"{day}T10:00:00+00:00"))
        for day in ("2026-03-04", "2026-02-28")
    ]
    bundle, _ = fit_bundle(folders, device=H200, provider="torch")
    assert bundle.version == "2026-03-04"


def test_a_folder_without_a_usable_sample_is_refused_with_the_reason(tmp_path: Path):
    folder = write(tmp_path, adds(valid=False, reason="too hot"))
    with pytest.raises(CalibrationError, match=r"no usable samples.*too hot"):
        fit(folder)


def test_what_is_not_used_is_counted_by_its_reason(tmp_path: Path):
    broken = [
        *adds(valid=False, reason="not steady")[:2],
        sample("op", [ADDS[0]], "a", None, reason="out of memory"),
        sample("op", [ADDS[0]], "a", trial(1.0, None)),
        # A board of which no run holds an anchor: nobody can tell its idle power.
        *(sample("op", [op], "z", trial(1.0, 300.0)) for op in ADDS[:3]),
    ]
    bundle, report = fit(write(tmp_path, [*adds(), *broken]))
    assert counted(report, "not steady") == 2
    assert counted(report, "out of memory") == 1
    assert counted(report, "no power") == 1
    assert counted(report, "board without an anchor") == 3
    assert sum(report.skipped.values()) == len(broken)
    assert bundle.facts["points"] == {"hf_add": len(ADDS)}
    costs = bundle.model(H200).costs(ADDS)  # which the broken ones would have thrown off
    assert [c.latency_s for c in costs] == pytest.approx([typical(o)[0] for o in ADDS], rel=0.01)


def test_a_kernel_of_three_points_is_left_to_the_roofline(tmp_path: Path):
    bundle, _ = fit(write(tmp_path, [*adds(), *(alone(op, "a") for op in GEMMS[:3])]))
    assert set(bundle.kernels) == {"hf_add"}


def test_one_board_claims_the_spread_of_h200s_in_general(tmp_path: Path):
    spread = fit(write(tmp_path, adds(), provenance(boards=(A,))))[0].spread
    assert (spread.memory_power, spread.compute_power) == (0.09, 0.05)
    assert (spread.memory_time, spread.idle_w) == (0.01, 4.0)


def test_without_host_points_there_is_no_host_law(tmp_path: Path):
    assert fit(write(tmp_path, adds()))[0].host is None


# ---------------------------------------------------------------- published collectives


@pytest.fixture(scope="module")
def table():
    return load_published(data_dir("calibration") / "published" / "nccl_latency.csv", "h200")


COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")


def test_published_table_has_all_collectives_at_two_four_and_eight(table):
    assert table.workers == (2, 4, 8)
    assert set(table.latency_s) == set(COLLECTIVES)
    assert all(v.shape == (3, len(table.values)) for v in table.latency_s.values())
    assert list(table.values) == sorted(table.values)


@pytest.mark.parametrize("kernel", COLLECTIVES)
def test_the_reference_count_stands_for_itself(table, kernel: str):
    for values in (100.0, 4096.0, 5e5, 1e9):
        assert table.ratio(kernel, values, 4, 4) == pytest.approx(1.0)


@pytest.mark.parametrize("kernel", COLLECTIVES)
def test_more_workers_never_speed_a_large_message_up(table, kernel: str):
    for values in table.values[-6:]:
        ratios = [table.ratio(kernel, values, n, 2) for n in (2, 3, 4, 6, 8)]
        assert all(r > 1 for r in ratios[1:]), values
        # The published all-reduce takes longer over 4 workers than over 8: other algorithms.
        assert kernel == "all_reduce" or ratios == sorted(ratios), values


def test_one_ratio_by_hand_from_the_newest_version(table):
    path = data_dir("calibration") / "published" / "nccl_latency.csv"
    with path.open(newline="", encoding="utf-8") as file:
        rows = [r for r in csv.DictReader(file) if r["device"] == "h200"]
    newest = [r for r in rows if r["nccl_version"] == "2.29.2" and r["collective"] == "all_reduce"]

    def seconds(workers: int, values: float) -> float:
        return float(
            np.median(
                [
                    float(r["latency_s"])
                    for r in newest
                    if int(r["workers"]) == workers and float(r["values"]) == values
                ]
            )
        )

    low, high = table.values[8:10]
    assert table.ratio("all_reduce", low, 8, 2) == pytest.approx(seconds(8, low) / seconds(2, low))
    # Half-way in both logarithms: the geometric mean of the neighbours.
    expected = math.sqrt(seconds(8, low) * seconds(8, high) / seconds(2, low) / seconds(2, high))
    assert table.ratio("all_reduce", math.sqrt(low * high), 8, 2) == pytest.approx(expected)


def published_csv(path: Path, row: Callable[[str, int, int], float]) -> Path:
    lines = ["device,nccl_version,collective,workers,values,latency_s"]
    for version, counts in (("2.9.1", (2, 4, 8)), ("2.10.0", (2, 4, 8)), ("2.30.0", (2,))):
        for workers in counts:
            for values in (1024, 4096):
                lines.append(
                    f"h200,{version},all_reduce,{workers},{values},{row(version, workers, values)}"
                )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_newest_means_by_number_and_with_all_worker_counts(tmp_path: Path):
    marks = {"2.9.1": 1.0, "2.10.0": 10.0, "2.30.0": 100.0}
    path = published_csv(tmp_path / "t.csv", lambda version, workers, _: marks[version] * workers)
    chosen = load_published(path, "h200")
    assert chosen is not None
    assert chosen.latency_s["all_reduce"].tolist() == [[20, 20], [40, 40], [80, 80]]


def test_a_device_that_is_not_in_the_table_has_none(tmp_path: Path):
    path = published_csv(tmp_path / "t.csv", lambda *_: 1e-5)
    assert load_published(path, "a6000") is None
