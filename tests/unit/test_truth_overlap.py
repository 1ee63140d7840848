"""Truth files of overlaps: rows that ran a GEMM, the all-reduce of its result, or both."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import Capture, error_of, run_json
from made_profile import phase, run, write
from scipy.optimize import brentq

from energylens import api
from energylens.cli import main
from energylens.cost.bundle import select
from energylens.cost.overlap import NCCL_SMS
from energylens.errors import SpecError
from energylens.graph import Op, make_op
from energylens.predict import Catalogue, overlap_ops
from energylens.results import Measurement, OverlapKind, OverlapRun
from energylens.spec.machines import load_device
from energylens.spec.system import Parallelism
from energylens.truth import read_measurements
from energylens.validate import ValidationRow

pytestmark = pytest.mark.usefixtures("no_debug")

PLAIN = {
    "record_id": "a",
    "device": "h200",
    "n_gpus": "2",
    "kind": "overlap",
    "tokens": "2048",
    "n": "8192",
    "k": "4096",
    "dtype": "bf16",
    "ctas": "4",
    "chunks": "4",
    "latency_s": "0.0006",
    "energy_j": "0.5",
}
STEP = (
    "record_id,device,engine,spec,phase,mode,batch,prompt_len,latency_s,energy_j\n"
    "step,h200,hf,llama3_8b,prefill,eager,8,1024,0.24,168\n"
)
CATALOGUE = Catalogue()
H200 = load_device("h200")
BUNDLE = select(CATALOGUE.bundles(H200, CATALOGUE.engine("hf")), "h200", "torch")


def write_rows(folder: Path, *rows: dict[str, str]) -> Path:
    """Plain rows with some of their cells replaced, named a, b, ..."""
    full = [{**PLAIN, "record_id": chr(ord("a") + i), **row} for i, row in enumerate(rows)]
    header = dict.fromkeys(name for row in full for name in row)
    lines = [",".join(header), *(",".join(row.get(name, "") for name in header) for row in full)]
    path = folder / "overlap.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def read(folder: Path, **cells: str) -> Measurement:
    (m,) = read_measurements([write_rows(folder, cells)])
    return m


def validated(folder: Path, **cells: str) -> ValidationRow:
    (row,) = api.validate(write_rows(folder, cells), catalogue=CATALOGUE).rows
    return row


# ---------------------------------------------------------------- reading


def test_a_row_tells_what_ran_and_what_it_took(tmp_path: Path) -> None:
    m = read(tmp_path, host_run="e", power_limit_w="600", regime="host")
    assert m.overlap == OverlapRun(
        kind=OverlapKind.OVERLAP, tokens=2048, n=8192, k=4096, dtype="bf16", sms=4, chunks=4
    )
    assert (m.record_id, m.device, m.parallelism) == ("a", "h200", Parallelism(tp=2))
    assert (m.latency_s, m.energy_j, m.power_limit_w) == (0.0006, 0.5, 600)
    assert (m.phase, m.prompt_len, m.regime) == ("overlap", 2048, "host")
    assert m.labels["host_run"] == "e"


def test_required_columns_are_enough(tmp_path: Path) -> None:
    path = tmp_path / "few.csv"
    path.write_text(
        "record_id,device,n_gpus,kind,tokens,n,k,energy_j\na,h200,2,sequential,64,128,256,0.1\n",
        encoding="utf-8",
    )
    (m,) = read_measurements([path])
    assert m.overlap == OverlapRun(kind=OverlapKind.SEQUENTIAL, tokens=64, n=128, k=256)
    assert m.latency_s is None


@pytest.mark.parametrize(
    ("cell", "sms"), [("", None), ("0", None), ("0.0", None), ("8", 8), ("8.0", 8)]
)
def test_no_number_of_sms_is_that_of_nccl(tmp_path: Path, cell: str, sms: int | None) -> None:
    m = read(tmp_path, ctas=cell)
    assert m.overlap is not None
    assert m.overlap.sms == sms


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ({"kind": "both"}, "kind is 'both', and must be one of gemm_only, allreduce_only, seq"),
        ({"tokens": "0"}, "tokens is '0', and must be a number above 0"),
        ({"n": "1.5"}, "n is '1.5', and must be a whole number"),
        ({"k": ""}, "k is '', and must be a whole number"),
        ({"ctas": "-1"}, "ctas is '-1', and must be a whole number; 0 or empty for NCCL's own"),
        ({"ctas": "few"}, "ctas is 'few', and must be a whole number"),
        ({"ctas": "inf"}, "ctas is 'inf', and must be a whole number"),
        ({"n_gpus": "1"}, "n_gpus is '1', and must be 2 or more for an all-reduce"),
        ({"chunks": ""}, "chunks is '', and must be a whole number"),
        ({"chunks": "4096"}, "chunks is '4096', and must be no more than the 2048 tokens"),
        ({"kind": "sequential"}, "chunks is '4', and must be 1 or empty for sequential"),
        ({"kind": "gemm_only"}, "chunks is '4', and must be 1 or empty for gemm_only"),
        ({"latency_s": "", "energy_j": ""}, "latency_s and energy_j are both empty"),
        ({"anchor_idle_w": "120"}, "anchor_idle_w is '120', and must hold one value per GPU, 2"),
        ({"regime": "gpu"}, "regime is 'gpu', and must be one of device, host"),
    ],
)
def test_wrong_cells_are_named_with_file_line_and_what_is_allowed(
    tmp_path: Path, cells: dict[str, str], told: str
) -> None:
    with pytest.raises(SpecError) as caught:
        read(tmp_path, **cells)
    assert str(caught.value).startswith(f"{tmp_path / 'overlap.csv'}:2: {told}")


def test_a_missing_column_is_told_with_those_that_are_needed(
    capsys: Capture, tmp_path: Path
) -> None:
    path = tmp_path / "short.csv"
    path.write_text("record_id,device,kind,tokens,n,k\n", encoding="utf-8")
    assert f"{path}:1: column 'n_gpus' is missing; a truth CSV of overlaps needs" in error_of(
        capsys, "validate", str(path)
    )


def test_a_file_of_steps_may_have_a_column_of_that_name(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    head, row = STEP.splitlines()
    path.write_text(f"{head},kind\n{row},warm\n", encoding="utf-8")
    (m,) = read_measurements([path])
    assert (m.overlap, m.spec, m.labels["kind"]) == (None, "llama3_8b", "warm")


# ---------------------------------------------------------------- what a row ran

VALUES = 2048 * 8192


def gemm(m: int = 2048, count: int = 1) -> Op:
    return make_op("gemm", m=m, n=8192, k=4096, count=count)


def all_reduce(sms: int) -> Op:
    return make_op("limited_all_reduce", values=VALUES, workers=2, sms=sms)


def beside(sms: int, chunks: int) -> Op:
    size = {"m": 2048, "n": 8192, "k": 4096}
    return make_op(
        "overlapped_all_reduce", values=VALUES, workers=2, sms=sms, chunks=chunks, **size
    )


ROWS = [
    ("gemm_only", None, 1, (gemm(),)),
    ("allreduce_only", 1, 1, (all_reduce(1),)),
    ("allreduce_only", 16, 1, (all_reduce(16),)),
    ("sequential", 2, 1, (gemm(), beside(2, 1))),
    ("overlap", 1, 2, (gemm(1024, 2), beside(1, 2))),
    ("overlap", 16, 8, (gemm(256, 8), beside(16, 8))),
]


@pytest.mark.parametrize(("kind", "sms", "chunks", "ops"), ROWS)
def test_a_row_is_made_of_these_ops(
    kind: str, sms: int | None, chunks: int, ops: tuple[Op, ...]
) -> None:
    ran = OverlapRun(kind=OverlapKind(kind), tokens=2048, n=8192, k=4096, sms=sms, chunks=chunks)
    assert overlap_ops(ran, H200, 2) == ops


def test_a_last_chunk_that_is_smaller_counts_as_a_whole_one() -> None:
    ran = OverlapRun(kind=OverlapKind.OVERLAP, tokens=10, n=64, k=64, sms=2, chunks=4)
    first, _ = overlap_ops(ran, H200, 2)
    assert (first.sizes["m"], first.count) == (3, 4)


@pytest.mark.parametrize(("sms", "taken"), [(None, 24), (32, 24), (24, 24), (23, 23), (1, 1)])
def test_nccl_takes_no_more_sms_than_it_would_by_itself(sms: int | None, taken: int) -> None:
    assert NCCL_SMS["h200", 2] == 24
    ran = OverlapRun(kind=OverlapKind.ALLREDUCE_ONLY, tokens=8, n=64, k=64, sms=sms)
    (op,) = overlap_ops(ran, H200, 2)
    assert op.sizes["sms"] == taken


# ---------------------------------------------------------------- predictions


def by_hand(ops: tuple[Op, ...]) -> tuple[float, float]:
    """Seconds and joules on two typical boards: costs added up at the clock that holds the cap."""
    assert BUNDLE is not None
    costs, laws = BUNDLE.model(H200).costs(ops), BUNDLE.laws
    base_w = BUNDLE.typical.idle_w
    if any("all_reduce" in op.kernel for op in ops):
        base_w += laws.link_w
    above_j = sum(op.count * c.energy_j for op, c in zip(ops, costs, strict=True))

    def seconds(clock: float) -> float:
        return sum(
            op.count
            * (c.latency_s * (1 + c.compute_share * (1 / clock - 1)) + laws.gap_s * op.launches)
            for op, c in zip(ops, costs, strict=True)
        )

    def joules(clock: float) -> float:
        return base_w * seconds(clock) + above_j * clock**laws.eta

    def over_w(clock: float) -> float:
        return joules(clock) / seconds(clock) - laws.cap_fraction * 700

    clock = 1.0 if over_w(1.0) <= 0 else float(brentq(over_w, 0.25, 1.0))
    return seconds(clock), 2 * joules(clock)


@pytest.mark.parametrize(("kind", "sms", "chunks", "ops"), ROWS)
def test_a_row_on_known_boards_is_what_its_costs_come_to(
    tmp_path: Path, kind: str, sms: int | None, chunks: int, ops: tuple[Op, ...]
) -> None:
    assert BUNDLE is not None
    names = ("idle_w", "stream_w", "gemm_w", "gemm_mhz", "gemm_tflops", "gemv_gbs")
    typical = {n: f"{getattr(BUNDLE.typical, n)!r}" for n in names}
    anchors = {f"anchor_{n}": f"{value};{value}" for n, value in typical.items()}
    row = validated(tmp_path, kind=kind, ctas=str(sms or ""), chunks=str(chunks), **anchors)
    latency_s, energy_j = by_hand(ops)
    assert row.reason is None
    assert row.latency_s.predicted == pytest.approx(latency_s, rel=1e-4)
    assert row.energy_j.predicted == pytest.approx(energy_j, rel=1e-4)
    assert row.bundles == (BUNDLE.ref,)
    # Of two boards that nobody knows one is slower, and both together draw about as much.
    assert row.energy_j.predicted_typical == pytest.approx(energy_j, rel=0.02)
    for found in (row.latency_s, row.energy_j):
        assert found.interval is not None
        assert found.predicted is not None
        low, high = found.interval
        assert low < found.predicted < high


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ({"device": "h300"}, "unknown device 'h300'"),
        ({"dtype": "fp7"}, "overlaps in 'fp7' are not priced; known: bf16, fp16, fp8"),
        ({"dtype": "fp32"}, "overlaps in 'fp32' are not priced"),
        ({"n_gpus": "4", "ctas": "500"}, "ctas is 500: h200 has 132 SMs"),
        ({"n_gpus": "4", "ctas": ""}, "NCCL's own number of SMs on 4 h200 is not known"),
        ({"device": "a6000", "ctas": "0"}, "NCCL's own number of SMs on 2 a6000 is not known"),
        ({"power_limit_w": "1000"}, "a power limit of 1000 W: h200 allows up to 700 W"),
        ({"power_limit_w": "130"}, "h200 cannot hold a power limit of 130 W"),
    ],
)
def test_a_row_that_cannot_be_predicted_is_kept_with_the_reason(
    tmp_path: Path, cells: dict[str, str], told: str
) -> None:
    row = validated(tmp_path, **cells)
    assert row.reason is not None
    assert told in row.reason
    assert "\n" not in row.reason
    assert (row.energy_j.measured, row.energy_j.predicted) == (0.5, None)


@pytest.mark.parametrize(
    ("cells", "source"),
    [
        ({"dtype": "fp8"}, "transferred"),
        ({"device": "a6000"}, "roofline"),
        ({"n_gpus": "8"}, "extrapolated"),
        ({"n_gpus": "4", "ctas": "", "kind": "gemm_only", "chunks": ""}, "measured"),
    ],
)
def test_what_was_not_measured_comes_from_a_weaker_source(
    tmp_path: Path, cells: dict[str, str], source: str
) -> None:
    row = validated(tmp_path, **cells)
    assert row.reason is None
    assert str(row.source) == source


# ---------------------------------------------------------------- the command


def test_files_of_all_kinds_mix(capsys: Capture, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    steps = tmp_path / "steps.csv"
    steps.write_text(STEP, encoding="utf-8")
    overlaps = write_rows(tmp_path, {}, {"ctas": "1"}, {"kind": "gemm_only", "chunks": ""})
    profile = write(tmp_path / "run.json", run(decode=phase(0.0115, 6.5)))
    page, plot = tmp_path / "page.md", tmp_path / "all.svg"
    document = run_json(
        capsys, "validate", str(steps), str(overlaps), str(profile), "--by", "kind",
        "--report", str(page), "--plot", str(plot),
    )  # fmt: skip
    rows = document["rows"]
    assert [r["record_id"] for r in rows] == ["step", "a", "b", "c", "run-decode"]
    assert [r["reason"] for r in rows] == [None] * 5
    assert len({tuple(r) for r in rows}) == 1  # one contract for all
    assert document["schema"] == "energylens/validation/v1"
    assert [(s["group"], s["n"]) for s in document["summary"]] == [
        ({}, 5),
        ({"kind": ""}, 2),
        ({"kind": "overlap"}, 2),
        ({"kind": "gemm_only"}, 1),
    ]
    assert "| overlap | device | torch |" in page.read_text(encoding="utf-8")
    assert plot.stat().st_size > 0


def test_options_act_on_such_rows_too(capsys: Capture, tmp_path: Path) -> None:
    anchors = {
        "anchor_idle_w": "140;140",
        "anchor_stream_w": "670;670",
        "anchor_gemm_w": "690;690",
        "anchor_gemm_tflops": "640;640",
    }
    file = str(write_rows(tmp_path, {"kind": "gemm_only", "chunks": "", **anchors}))

    def energy(*options: str) -> dict[str, float]:
        (row,) = run_json(capsys, "validate", file, *options)["rows"]
        found = row["energy_j"]
        assert isinstance(found, dict)
        return found

    own, typical, capless = energy(), energy("--ignore-anchors"), energy("--without", "cap")
    assert own["predicted"] != own["predicted_typical"]
    assert typical["predicted"] == typical["predicted_typical"] == own["predicted_typical"]
    assert capless["predicted"] > own["predicted"]


def test_rows_show_in_the_table(capsys: Capture, tmp_path: Path) -> None:
    file = write_rows(tmp_path, {}, {"device": "h300"})
    assert main(["validate", str(file), "--by", "kind,ctas"]) == 0
    shown = capsys.readouterr().out
    assert "1 of 2 rows predicted" in shown
    assert "not predicted, b: unknown device 'h300'" in shown


def test_the_shared_overlaps_are_predicted_within_the_aim(
    capsys: Capture, shared_truth: Path
) -> None:
    file = shared_truth / "h200x2_overlap.csv"
    if not file.is_file():
        pytest.skip("no overlaps in the shared truth")
    document = run_json(capsys, "validate", str(file), "--by", "kind")
    lines = file.read_text(encoding="utf-8").splitlines()[1:]
    assert [r["record_id"] for r in document["rows"]] == [line.split(",")[0] for line in lines]
    whole, *groups = document["summary"]
    assert whole["n_unpredicted"] == 0
    mape = {s["group"]["kind"]: s["energy_mape_pct"] for s in groups}
    assert mape["overlap"] < 8
    assert mape["sequential"] < 8
    assert mape["gemm_only"] < 4
