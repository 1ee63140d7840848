"""Profiles as truth: each measured phase is a row, with the same values and checks as in a CSV."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_profile import phase, run, write

from energylens.errors import SpecError
from energylens.predict import Catalogue, predict_measurement
from energylens.results import KernelRow, Kind, Measurement
from energylens.spec.system import Parallelism
from energylens.truth import read_measurements
from energylens.validate import Validation, validate

CATALOGUE = Catalogue()


def read(folder: Path, **fields: Any) -> tuple[Measurement, ...]:
    return read_measurements([write(folder / "run.json", run(**fields))])


def kernel(latency_s: float) -> dict[str, Any]:
    whole = {"phase": "decode", "kind": "gemm", "op": "nvjet", "count": 1, "share": 1}
    return {**whole, "latency_s": latency_s}


def test_every_measured_phase_is_a_row(tmp_path: Path) -> None:
    prefill, decode, request = read(
        tmp_path,
        prefill=phase(0.3, 200.0, regime="host"),
        decode=phase(0.0123, 6.5, context_len=1100.5),
        request=phase(1.9, 1000.0, regime=None),
    )
    assert [m.record_id for m in (prefill, decode, request)] == [
        "run-prefill",
        "run-decode",
        "run-request",
    ]
    assert (decode.spec, decode.device, decode.engine) == ("llama3_8b", "h200", "hf")
    assert (decode.engine_version, decode.precision) == ("5.17.0", "bf16")
    assert (decode.batch, decode.prompt_len, decode.gen_len) == (16, 1024, 128)
    assert (decode.latency_s, decode.energy_j, decode.context_len) == (0.0123, 6.5, 1100.5)
    assert (prefill.context_len, request.context_len) == (None, None)
    assert (prefill.mode, decode.mode, request.mode) == ("eager", "cuda_graph", "cuda_graph")
    assert (prefill.prefill_mode, decode.prefill_mode, request.prefill_mode) == (
        None,
        None,
        "eager",
    )
    assert [m.regime for m in (prefill, decode, request)] == ["host", "device", "device"]
    assert decode.labels["board_uuid"] == "dca3955ee6"
    assert (decode.labels["sm_clock_mhz"], decode.labels["ticks"]) == ("1980.0", "40")


def test_a_byte_order_mark_is_no_part_of_the_document(tmp_path: Path) -> None:
    path = write(tmp_path / "run.json", run(decode=phase()))
    plain = read_measurements([path])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_measurements([path]) == plain


def test_a_decode_step_without_a_context_of_its_own_has_the_workloads(tmp_path: Path) -> None:
    (m,) = read(tmp_path, decode=phase())
    assert m.context_len == 1088


def test_degrees_and_boards_are_read(tmp_path: Path) -> None:
    boards = [{"board_uuid": u, "mean_power_w": w} for u, w in (("a", 600.0), ("b", 610.5))]
    (m,) = read(tmp_path, parallelism={"tp": 2}, n_gpus=2, prefill=phase(per_gpu=boards))
    assert m.parallelism == Parallelism(tp=2)
    assert (m.labels["board_uuid"], m.labels["board_power_w"]) == ("a;b", "600.0;610.5")


def test_anchors_of_the_document_are_the_rows(tmp_path: Path) -> None:
    board = {
        "board_uuid": "dca3955ee6",
        "device": "h200",
        "idle_w": 129.3,
        "stream_w": 673.2,
        "gemm_w": 691.6,
        "gemm_tflops": 649.5,
    }
    host = {"launch_us": 4.2, "module_us": 60.0, "cpu": "Xeon"}
    anchors = {"schema": "energylens/anchor/v1", "boards": [board], "host": host}
    (m,) = read(tmp_path, decode=phase(), anchors=anchors)
    assert m.anchors is not None
    assert m.anchors.host is not None
    assert (m.anchors.boards[0].idle_w, m.anchors.host.module_us) == (129.3, 60.0)


def test_noise_is_the_half_width_of_the_95_percent_interval(tmp_path: Path) -> None:
    (m,) = read(tmp_path, decode=phase(0.02))
    assert m.latency_noise == pytest.approx(0.001)
    assert m.energy_noise == pytest.approx(1.96 * 0.002)
    (lone,) = read(tmp_path, decode=phase(n=1, energy_rel_se=None))
    assert (lone.latency_noise, lone.energy_noise) == (None, None)


def test_invalid_phases_are_told_with_their_flags(tmp_path: Path) -> None:
    good, bad = read(
        tmp_path, prefill=phase(), decode=phase(valid=False, flags=["throttled", "too_short"])
    )
    assert good.defect is None
    assert bad.defect == "not valid as measured: throttled, too_short"


def test_kernels_go_to_their_phase(tmp_path: Path) -> None:
    rows = [
        {
            "phase": p,
            "kind": k,
            "op": "nvjet",
            "count": 32.0,
            "latency_s": s,
            "share": 1.0,
        }
        for p, k, s in (("prefill", "gemm", 0.2), ("decode", "attention", 0.002))
    ]
    prefill, decode = read(tmp_path, prefill=phase(), decode=phase(), breakdown=rows)
    assert [k.kind for k in prefill.kernels] == [Kind.GEMM]
    assert decode.kernels == (
        KernelRow(
            phase="decode",
            kind=Kind.ATTENTION,
            op="nvjet",
            count=32.0,
            latency_s=0.002,
            share=1.0,
        ),
    )


def test_energy_that_is_not_available_is_absent_and_says_why(tmp_path: Path) -> None:
    (m,) = read(
        tmp_path, decode=phase(energy_j=None, per_gpu=[]), energy_reason="no GPU with a sensor"
    )
    assert m.energy_j is None
    assert m.labels["energy_reason"] == "no GPU with a sensor"


def test_what_has_no_sheet_goes_by_its_own_name_and_is_no_error(tmp_path: Path) -> None:
    rows = read(tmp_path, spec=None, device=None, decode=phase())
    assert (rows[0].spec, rows[0].device) == ("meta-llama/Llama-3.1-8B", "NVIDIA H200")
    (row,) = beside(rows).rows
    assert row.reason is not None
    assert "meta-llama/Llama-3.1-8B" in row.reason


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"schema": "energylens/profile/v9"}, ": schema is 'energylens/profile/v9', and must be"),
        ({"workload": {"batch": 0}}, ": decode: batch is '0', and must be a number above 0"),
        ({"workload": {"batch": True}}, ": workload.batch: must be a text or a number, not True"),
        ({"modes": {"decode": "graph"}}, ": decode: mode is 'graph', and must be one of eager"),
        ({"n_gpus": 4}, ": decode: n_gpus is '4', and must equal replicas*dp*tp*pp, which is 1"),
        ({"parallelism": 3}, ": parallelism: must be an object, not 3"),
        ({"anchors": []}, ": anchors: must be an object of schema energylens/anchor/v1, not list"),
        ({"breakdown": [{"phase": "decode", "kind": "matmul"}]}, ": breakdown: a row needs phase"),
        ({"breakdown": {}}, ": breakdown: must be a list or null"),
        ({"decode": 3}, ": decode: must be an object, not 3"),
        ({"decode": phase(0.0)}, ": decode: latency_s is '0.0', and must be a number above 0"),
        ({"decode": phase(energy_j=-1.0)}, ": decode: energy_j is '-1.0'"),
        ({"decode": phase(energy_rel_se="?")}, ": decode.energy_rel_se: must be a number from 0"),
        ({"decode": phase(energy_rel_se=math.inf)}, ": decode.energy_rel_se: must be a number"),
        ({"decode": phase(latency={"ci95": [1]})}, ": decode.latency.ci95: must be two numbers"),
        ({"decode": phase(latency={"ci95": [math.nan, 1]})}, ": decode.latency.ci95: must be two"),
        ({"decode": phase(latency={"ci95": [2, 1]})}, ": decode.latency.ci95: must be two"),
        ({"record_id": None}, ": record_id is empty"),
        ({"breakdown": [kernel(math.nan)]}, ": breakdown[0]: latency_s is nan, and must be"),
        ({"breakdown": [kernel(1), kernel(-1)]}, ": breakdown[1]: latency_s is -1.0, and must be"),
        ({"decode": phase(per_gpu=3)}, ": decode.per_gpu: must be a list, not 3"),
        ({"decode": None}, ": no measured rows"),
    ],
)
def test_wrong_values_are_named_with_file_and_field(
    tmp_path: Path, fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(SpecError) as caught:
        read(tmp_path, **({"decode": phase()} | fields))
    assert str(caught.value).startswith(f"{tmp_path / 'run.json'}{told}")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"schema": "energylens/prof', "not JSON (Unterminated string"),
        ("[]", "schema is None, and must be 'energylens/profile/v1'"),
        ("record_id,device\n", "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_files_that_are_no_profile_are_one_clear_error(
    tmp_path: Path, text: str, told: str
) -> None:
    path = tmp_path / "run.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        read_measurements([path])
    assert str(caught.value).startswith(f"{path}: {told}")
    with pytest.raises(SpecError, match=r"none.json: cannot be read \(No such file"):
        read_measurements([tmp_path / "none.json"])


def test_ids_are_unique_over_files_of_both_kinds(tmp_path: Path) -> None:
    path = write(tmp_path / "run.json", run(decode=phase()))
    with pytest.raises(SpecError, match="run-decode', and must be unique; it is also at"):
        read_measurements([path, path])


# ---------------------------------------------------------------- the same as in a CSV


def beside(rows: tuple[Measurement, ...]) -> Validation:
    return validate(
        rows,
        lambda m, anchors: predict_measurement(
            m, anchors=anchors, without=frozenset(), catalogue=CATALOGUE
        ),
    )


def as_profile(cells: dict[str, str]) -> dict[str, Any]:
    """A row of a truth CSV as the profile of a run that measured this phase only."""

    def number(name: str) -> float | None:
        return float(cells[name]) if cells.get(name) else None

    def parts(name: str) -> list[str]:
        return cells[name].split(";") if cells.get(name) else []

    boards = [
        {
            "board_uuid": uuid,
            "device": cells["device"],
            **{n: float(parts(f"anchor_{n}")[i]) for n in ANCHOR},
        }
        for i, uuid in enumerate(parts("board_uuid"))
    ]
    found = phase(
        float(cells["latency_s"]),
        number("energy_j"),
        context_len=number("context_len"),
        regime=cells["regime"],
        per_gpu=[{"board_uuid": uuid} for uuid in parts("board_uuid")],
    )
    tp, ep = int(cells["tp"]), int(cells["ep"])
    return run(
        record_id=cells["record_id"],
        **{n: cells[n] for n in ("device", "engine", "engine_version", "model", "precision")},
        spec=cells["spec"],
        parallelism={"tp": tp, "ep": ep},
        n_gpus=tp,
        workload={"batch": int(cells["batch"]), "prompt_len": int(cells["prompt_len"])},
        modes=dict.fromkeys(("prefill", "decode"), cells["mode"]),
        anchors={"schema": "energylens/anchor/v1", "boards": boards} if boards else None,
        **{cells["phase"]: found},
    )


ANCHOR = ("idle_w", "stream_w", "gemm_w", "gemm_mhz", "gemm_tflops", "gemv_gbs")


def assert_the_same(folder: Path, rows: list[dict[str, str]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    table = folder / "truth.csv"
    table.write_text(text.getvalue(), encoding="utf-8")
    files = [write(folder / f"{i}.json", as_profile(row)) for i, row in enumerate(rows)]
    of_csv, of_json = (beside(read_measurements(paths)) for paths in ([table], files))
    for a, b in zip(of_csv.rows, of_json.rows, strict=True):
        assert f"{a.measurement.record_id}-{a.measurement.phase}" == b.measurement.record_id
        assert (a.latency_s, a.energy_j, a.reason) == (b.latency_s, b.energy_j, b.reason)
        assert a.measurement.parallelism == b.measurement.parallelism
    assert of_csv.summary == of_json.summary


def test_truth_rows_written_as_profiles_have_the_same_errors(
    tmp_path: Path, shared_truth: Path
) -> None:
    for name in ("h200_hf.csv", "h200_vllm.csv"):
        text = (shared_truth / name).read_text(encoding="utf-8")
        assert_the_same(tmp_path, list(csv.DictReader(io.StringIO(text)))[::4])


positive = st.floats(1e-4, 1e3, allow_nan=False)


@settings(max_examples=15)
@given(
    latency=positive,
    energy=st.none() | positive,
    batch=st.integers(1, 64),
    prompt=st.integers(1, 4096),
    tp=st.sampled_from([1, 2]),
    phase_and_mode=st.sampled_from(
        [("prefill", "eager"), ("decode", "eager"), ("decode", "cuda_graph")]
    ),
    context=st.floats(1.0, 8192.0),
    anchored=st.booleans(),
)
def test_any_row_has_the_same_errors_in_both_formats(
    tmp_path_factory: pytest.TempPathFactory,
    latency: float,
    energy: float | None,
    batch: int,
    prompt: int,
    tp: int,
    phase_and_mode: tuple[str, str],
    context: float,
    anchored: bool,
) -> None:
    row = {
        "record_id": "row",
        "device": "h200",
        "n_gpus": str(tp),
        "engine": "hf",
        "engine_version": "5.17.0",
        "model": "m",
        "spec": "llama3_8b",
        "precision": "bf16",
        "tp": str(tp),
        "ep": "1",
        "phase": phase_and_mode[0],
        "mode": phase_and_mode[1],
        "batch": str(batch),
        "prompt_len": str(prompt),
        "context_len": repr(context),
        "latency_s": repr(latency),
        "energy_j": "" if energy is None else repr(energy),
        "regime": "device",
    }
    values = dict(zip(ANCHOR, (129.3, 673.2, 691.6, 1430.0, 649.5, 4241.0), strict=True))
    if anchored:
        row["board_uuid"] = ";".join(f"b{i}" for i in range(tp))
        row |= {f"anchor_{n}": ";".join([repr(v)] * tp) for n, v in values.items()}
    assert_the_same(tmp_path_factory.mktemp("rows"), [row])


def test_a_request_is_predicted_in_the_modes_of_both_its_phases(tmp_path: Path) -> None:
    mixed, eager, graph = (
        beside(read(tmp_path, request=phase(2.0, 900.0), modes={"prefill": p, "decode": d})).rows[0]
        for p, d in (("eager", "cuda_graph"), ("eager", "eager"), ("cuda_graph", "cuda_graph"))
    )
    assert mixed.reason is None
    seconds = [r.latency_s.predicted or 0.0 for r in (graph, mixed, eager)]
    assert seconds[0] <= seconds[1] < seconds[2]
