"""Truth files: every cell becomes a value or an error that says where it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from energylens.errors import SpecError
from energylens.results import Measurement
from energylens.spec.system import Parallelism
from energylens.truth import read_measurements

REQUIRED = "record_id,device,engine,spec,phase,mode,batch,prompt_len,latency_s,energy_j"
ROW = "a,h200,hf,llama3_8b,decode,eager,16,1024,0.0256,6.5"


def read(folder: Path, text: str) -> tuple[Measurement, ...]:
    path = folder / "truth.csv"
    path.write_text(text, encoding="utf-8")
    return read_measurements([path])


def with_columns(**cells: str) -> str:
    names, values = ",".join(cells), ",".join(cells.values())
    return f"{REQUIRED},{names}\n{ROW},{values}\n"


def replaced(**cells: str) -> str:
    """The plain row with some of its cells replaced."""
    row = dict(zip(REQUIRED.split(","), ROW.split(","), strict=True)) | cells
    return f"{REQUIRED}\n{','.join(row.values())}\n"


def test_required_columns_are_enough_and_the_rest_has_defaults(tmp_path: Path) -> None:
    (m,) = read(tmp_path, f"{REQUIRED}\n{ROW}\n")
    assert (m.record_id, m.device, m.engine, m.spec) == ("a", "h200", "hf", "llama3_8b")
    assert (m.phase, m.mode, m.batch, m.prompt_len) == ("decode", "eager", 16, 1024)
    assert (m.latency_s, m.energy_j) == (0.0256, 6.5)
    assert m.parallelism == Parallelism()
    assert (m.context_len, m.gen_len, m.power_limit_w, m.anchors) == (None, None, None, None)
    assert (m.precision, m.regime, m.engine_version) == (None, "device", "")


def test_one_of_latency_and_energy_is_enough(tmp_path: Path) -> None:
    (m,) = read(tmp_path, replaced(energy_j=""))
    assert m.energy_j is None
    (m,) = read(tmp_path, replaced(latency_s=""))
    assert m.latency_s is None


def test_optional_columns_are_read(tmp_path: Path) -> None:
    text = with_columns(
        context_len="1100.5",
        gen_len="64",
        tp="2",
        pp="2",
        dp="1",
        replicas="1",
        n_gpus="4",
        power_limit_w="500",
        regime="host",
        precision="fp8",
        engine_version="5.17",
    )
    (m,) = read(tmp_path, text)
    assert (m.context_len, m.gen_len, m.power_limit_w) == (1100.5, 64, 500)
    assert m.parallelism == Parallelism(tp=2, pp=2)
    assert (m.regime, m.precision, m.engine_version) == ("host", "fp8", "5.17")


def test_anchors_are_read_per_board(tmp_path: Path) -> None:
    text = with_columns(
        tp="2",
        board_uuid="dca;f71",
        anchor_idle_w="129.3;119.9",
        anchor_stream_w="673.2;641.2",
        anchor_gemm_w="691.6;691.3",
        anchor_gemm_mhz="1430;",
        anchor_gemm_tflops="649.5;662.9",
    )
    (m,) = read(tmp_path, text)
    assert m.anchors is not None
    first, second = m.anchors.boards
    assert (first.board_uuid, second.board_uuid) == ("dca", "f71")
    assert (first.idle_w, second.idle_w) == (129.3, 119.9)
    assert (first.stream_w, second.gemm_tflops) == (673.2, 662.9)
    assert (first.gemm_mhz, second.gemm_mhz) == (1430, None)
    assert first.gemv_gbs is None
    assert first.device == "h200"


def test_host_launch_time_becomes_a_host_anchor(tmp_path: Path) -> None:
    (m,) = read(tmp_path, with_columns(host_launch_us="4.2"))
    assert m.anchors is not None
    assert m.anchors.host is not None
    assert (m.anchors.host.launch_us, m.anchors.host.module_us) == (4.2, None)
    assert m.anchors.boards == ()


def test_incomplete_anchors_are_told_and_the_row_is_typical(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (m,) = read(tmp_path, with_columns(anchor_idle_w="129.3", anchor_stream_w="673.2"))
    assert m.anchors is None
    assert "1 rows are predicted as a typical board" in caplog.text


def test_unknown_columns_are_kept_as_labels(tmp_path: Path) -> None:
    (m,) = read(tmp_path, with_columns(host_run="e"))
    assert m.labels["host_run"] == "e"


def test_byte_order_mark_blank_lines_and_integral_floats_are_accepted(tmp_path: Path) -> None:
    (m,) = read(tmp_path, f"\ufeff{replaced(batch='16.0')}\n\n")
    assert m.batch == 16


def test_rows_of_several_files_keep_their_order(tmp_path: Path) -> None:
    first, second = tmp_path / "1.csv", tmp_path / "2.csv"
    first.write_text(f"{REQUIRED}\n{ROW}\n", encoding="utf-8")
    second.write_text(replaced(record_id="b"), encoding="utf-8")
    assert [m.record_id for m in read_measurements([second, first])] == ["b", "a"]


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ({"phase": "train"}, "phase is 'train', and must be one of prefill, decode, request"),
        ({"mode": "graph"}, "mode is 'graph', and must be one of eager, cuda_graph, serving"),
        ({"batch": "0"}, "batch is '0', and must be a number above 0"),
        ({"batch": "1.5"}, "batch is '1.5', and must be a whole number"),
        ({"batch": ""}, "batch is '', and must be a whole number"),
        ({"prompt_len": "many"}, "prompt_len is 'many', and must be a number above 0"),
        ({"energy_j": "0"}, "energy_j is '0', and must be a number above 0; leave the cell empty"),
        ({"energy_j": "-2"}, "energy_j is '-2'"),
        ({"latency_s": "nan"}, "latency_s is 'nan'"),
        ({"latency_s": "inf"}, "latency_s is 'inf'"),
        ({"latency_s": "", "energy_j": ""}, "latency_s and energy_j are both empty"),
        ({"spec": ""}, "spec is '', and must not be empty"),
        ({"record_id": ""}, "record_id is '', and must not be empty"),
    ],
)
def test_wrong_cells_are_named_with_file_line_and_what_is_allowed(
    tmp_path: Path, cells: dict[str, str], told: str
) -> None:
    with pytest.raises(SpecError) as caught:
        read(tmp_path, replaced(**cells))
    assert str(caught.value).startswith(f"{tmp_path / 'truth.csv'}:2: {told}")


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ({"regime": "gpu"}, "regime is 'gpu', and must be one of device, host"),
        ({"tp": "2", "n_gpus": "4"}, "n_gpus is '4', and must equal replicas*dp*tp*pp, which is 2"),
        ({"tp": "2", "ep": "3"}, "ep=3 must divide tp*dp"),
        (
            {"tp": "2", "anchor_idle_w": "129"},
            "anchor_idle_w is '129', and must hold one value per",
        ),
        ({"anchor_idle_w": "x"}, "anchor_idle_w is 'x', and must be a number above 0"),
        ({"board_uuid": "a;b"}, "board_uuid is 'a;b', and must hold one value per GPU, 1"),
    ],
)
def test_wrong_optional_cells_are_named_too(
    tmp_path: Path, cells: dict[str, str], told: str
) -> None:
    with pytest.raises(SpecError) as caught:
        read(tmp_path, with_columns(**cells))
    assert str(caught.value).startswith(f"{tmp_path / 'truth.csv'}:2: {told}")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", ":1: column 'record_id' is missing"),
        (f"{REQUIRED.replace(',mode', '')}\n", ":1: column 'mode' is missing"),
        ("record_id,device,engine,spec,phase,mode,batch,prompt_len\n", "latency_s or energy_j"),
        (f"{REQUIRED},device\n", ":1: column 'device' appears twice"),
        (f"{REQUIRED}\n", "no measured rows"),
        (
            f"{REQUIRED}\n{ROW}\n{ROW[:20]}",
            ":3: 5 cells below a header of 10; is the file cut off?",
        ),
        (f'{REQUIRED}\n"{ROW}\n', "not a CSV file"),
        (f"{REQUIRED}\n{ROW}\n{ROW}\n", ":3: record_id is 'a', and must be unique; it is also at"),
    ],
)
def test_broken_files_are_refused_as_a_whole(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(SpecError) as caught:
        read(tmp_path, text)
    assert told in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"missing\.csv: cannot be read"):
        read_measurements([tmp_path / "missing.csv"])
    with pytest.raises(SpecError, match="cannot be read"):
        read_measurements([tmp_path])
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(SpecError, match=r"binary\.csv: not a CSV file in UTF-8"):
        read_measurements([binary])


def test_shared_truth_is_read_whole(shared_truth: Path) -> None:
    measurements = read_measurements([shared_truth / "h200_hf.csv", shared_truth / "h200_vllm.csv"])
    assert len(measurements) == 35 + 43
    assert all(m.anchors and len(m.anchors.boards) == m.parallelism.gpus for m in measurements)
