import csv
import json
import logging
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energylens.errors import CalibrationError, SpecError
from energylens.graph import KERNELS, Op, make_op
from energylens.results import Anchors, BoardAnchor
from energylens.store import (
    Provenance,
    Sample,
    Store,
    Trial,
    board_hash,
    format_op,
    new_run_id,
    parse_op,
    read_samples,
    sample_key,
)

GEMM = make_op("gemm", m=16, n=4096, k=4096)
BOARD = board_hash("GPU-0001")
RUN = "run1"


def trial(**changes: object) -> Trial:
    values: dict[str, object] = {
        "latency_s": 1.25e-5,
        "latency_rel_se": 0.001,
        "power_w": 512.5,
        "power_rel_se": 0.01,
        "clock_hz": 1.98e9,
        "clock_min_hz": 1.965e9,
        "temperature_c": 51.0,
        "ticks": 8,
        "window_s": 0.81,
        "instant_power_w": 515.0,
        "flags": ("power_capped", "not_steady"),
    }
    return Trial(**(values | changes))  # type: ignore[arg-type]


def sample(op: Op = GEMM, **changes: object) -> Sample:
    values: dict[str, object] = {
        "block": "op",
        "label": op.name,
        "ops": (op,),
        "trial": trial(),
        "board_uuid": BOARD,
        "run_id": RUN,
        "time": "2026-11-30T10:00:00+00:00",
    }
    return Sample(**(values | changes))  # type: ignore[arg-type]


def provenance(run_id: str = RUN, limit: float | None = 700.0) -> Provenance:
    return Provenance(
        run_id=run_id,
        time="2026-11-30T09:59:00+00:00",
        device="h200",
        provider="torch",
        power_limit_w=limit,
        boards={BOARD: {"driver": "580.159"}},
        versions={"torch": "2.11"},
        host={"cpu": "some cpu"},
        seed=3,
        data="normal",
        anchors=Anchors(
            boards=(
                BoardAnchor(
                    board_uuid=BOARD,
                    device="h200",
                    idle_w=120.0,
                    stream_w=640.0,
                    gemm_tflops=660.0,
                    gemm_w=699.0,
                ),
            )
        ),
    )


def filled(folder, samples):
    with Store(folder) as store:
        store.begin(provenance())
        for s in samples:
            store.append(s)
    return folder / "samples.csv"


def test_what_is_appended_is_read_back_equal(tmp_path):
    mix = sample(
        block="mix",
        label="llama3_8b tp1 layer",
        mode="cuda_graph",
        ops=(
            GEMM,
            make_op("hf_add", name="residual", rows=16, width=4096, count=2, launches=1),
            make_op(
                "attention_decode",
                launches=3,
                batch=2,
                new=1,
                context=1087.5,
                q_heads=32,
                kv_heads=8,
                head_dim=128,
            ),
        ),
    )
    no_energy = sample(
        block="host",
        label="host, prefill",
        ops=(),
        mode="eager",
        trial=trial(
            power_w=None,
            power_rel_se=None,
            clock_hz=None,
            clock_min_hz=None,
            temperature_c=None,
            instant_power_w=None,
            flags=(),
            ticks=0,
            valid=False,
            reason='sensor "lost", sorry',
        ),
    )
    skipped = sample(make_op("gemm", m=1, n=2, k=3), trial=None, reason="out of memory")
    samples = [sample(), mix, no_energy, skipped]
    filled(tmp_path, samples)

    again = Store(tmp_path)

    assert list(again) == samples
    assert again.runs == {RUN: provenance()}


def test_a_run_can_go_on_in_the_same_file(tmp_path):
    first, second = sample(), sample(make_op("gemm", m=1, n=64, k=64))
    filled(tmp_path, [first])
    filled(tmp_path, [second])
    assert Store(tmp_path).samples == (first, second)


@given(st.data())
def test_the_text_form_of_an_op_is_lossless(data):
    kernel = data.draw(st.sampled_from(sorted(KERNELS)))
    size = st.integers(1, 1 << 40).map(float) | st.floats(1, 1e6)
    op = make_op(
        kernel,
        name=data.draw(st.from_regex(r"[a-z_][a-z0-9_.+-]*", fullmatch=True)),
        dtype=data.draw(st.sampled_from(["bf16", "fp8"])),
        count=data.draw(st.integers(1, 200)),
        launches=data.draw(st.integers(1, 30)),
        **{d: data.draw(size) for d in KERNELS[kernel].dims},
    )
    assert parse_op(format_op(op)) == op


@pytest.mark.parametrize("name", ["q+k+v", "gate+up", "q_norm+k_norm+rope"])
def test_an_op_of_fused_entries_is_read_back_from_a_file(tmp_path, name):
    fused = make_op("gemm", name=name, m=17, n=6144, k=4096, count=32)
    step = sample(block="host", label="decode", mode="serving", ops=(fused, GEMM))
    filled(tmp_path, [sample(fused), step])
    again = Store(tmp_path).samples
    assert again == (sample(fused), step)
    assert again[1].ops[0].name == name


def test_the_text_form_of_an_op_can_be_read_by_people():
    op = make_op("gemm", name="gate", m=16, n=14336, k=4096, count=32)
    assert format_op(op) == "gate=gemm:bf16(m=16,n=14336,k=4096) x32"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gemm", "is not an op"),
        ("q=gemm:bf16(m=16,n=4096)", "needs the sizes m, n, k"),
        ("q=gem:bf16(m=16)", "unknown kernel 'gem'"),
        ("q=gemm:bf16(m=16,n,k=4)", "name=number"),
    ],
)
def test_a_text_that_is_not_an_op_is_refused(text, says):
    with pytest.raises(SpecError, match=says):
        parse_op(text)


def test_a_cut_off_last_line_is_dropped_with_a_warning_and_overwritten(tmp_path, caplog):
    path = filled(tmp_path, [sample(), sample(make_op("gemm", m=1, n=64, k=64))])
    path.write_bytes(path.read_bytes()[:-30])

    with caplog.at_level(logging.WARNING):
        store = Store(tmp_path)
    assert store.samples == (sample(),)
    assert "cut off" in caplog.text

    third = sample(make_op("gemm", m=2, n=64, k=64))
    store.append(third)
    store.close()
    assert Store(tmp_path).samples == (sample(), third)


def test_a_file_cut_off_in_its_header_counts_as_empty(tmp_path):
    path = filled(tmp_path, [sample()])
    path.write_bytes(path.read_bytes()[:10])
    store = Store(tmp_path)
    assert store.samples == ()
    store.append(sample())
    store.close()
    assert Store(tmp_path).samples == (sample(),)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("latency_s", "0.0"),
        ("latency_s", "-1e-5"),
        ("latency_s", "nan"),
        ("latency_s", ""),
        ("latency_s", "fast"),
        ("power_w", "0"),
        ("power_w", "-3"),
        ("power_w", "inf"),
        ("ops", "gemm"),
        ("ops", ""),
        ("block", "ops"),
        ("valid", "yes"),
        ("ticks", "many"),
    ],
)
def test_a_broken_row_is_refused_with_its_number(tmp_path, column, value):
    others = [make_op("gemm", m=m, n=64, k=64) for m in (1, 2)]
    path = filled(tmp_path, [sample(), sample(others[0]), sample(others[1])])
    lines = path.read_text().splitlines(keepends=True)
    header = lines[0].strip().split(",")
    cells = next(csv.reader([lines[2]]))
    cells[header.index(column)] = value
    with path.open("w", newline="") as f:
        f.write("".join(lines[:2]))
        csv.writer(f, lineterminator="\n").writerow(cells)
        f.write(lines[3])
    with pytest.raises(CalibrationError, match=r"samples\.csv, line 3: "):
        Store(tmp_path)


def test_a_line_with_missing_columns_in_the_middle_is_an_error(tmp_path):
    path = filled(tmp_path, [sample(), sample(make_op("gemm", m=1, n=64, k=64))])
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1][:40] + "\n" + lines[2])
    with pytest.raises(CalibrationError, match=r"line 2: .* columns instead of"):
        read_samples(path)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "samples.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(CalibrationError, match="line 1: not the columns"):
        read_samples(path)
    path.write_bytes(b"\xff\xfe\x00\n")
    with pytest.raises(CalibrationError, match="not a text file"):
        read_samples(path)
    with pytest.raises(CalibrationError, match="no such file"):
        read_samples(tmp_path / "other.csv")


@pytest.mark.parametrize("bad", [{"latency_s": 0.0}, {"power_w": 0.0}, {"latency_s": -1.0}])
def test_an_impossible_measurement_is_never_written(tmp_path, bad):
    with Store(tmp_path) as store:
        store.begin(provenance())
        with pytest.raises(CalibrationError, match="positive"):
            store.append(sample(trial=trial(**bad)))
    assert Store(tmp_path).samples == ()


def test_a_sample_needs_its_provenance(tmp_path):
    with Store(tmp_path) as store, pytest.raises(CalibrationError, match="no provenance"):
        store.append(sample())
    filled(tmp_path, [sample()])
    (tmp_path / "provenance.json").write_text('{"schema": "energylens/provenance/v1", "runs": {}}')
    with pytest.raises(CalibrationError, match=r"run run1 of samples\.csv is not in it"):
        Store(tmp_path)
    (tmp_path / "provenance.json").unlink()
    with pytest.raises(CalibrationError, match="missing"):
        Store(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "schema must be"),
        ('{"schema": "energylens/provenance/v1"}', "runs must be"),
        ('{"schema": "energylens/provenance/v1", "runs": {"a": 1}}', "runs.a: must be an object"),
        (
            '{"schema": "energylens/provenance/v1", "runs": {"a": {"time": ""}}}',
            "device is missing",
        ),
    ],
)
def test_a_broken_sidecar_says_what_is_wrong(tmp_path, text, says):
    filled(tmp_path, [sample()])
    (tmp_path / "provenance.json").write_text(text)
    with pytest.raises(CalibrationError, match=says):
        Store(tmp_path)


def test_power_limits_do_not_mix_and_both_are_named(tmp_path):
    filled(tmp_path, [sample()])
    store = Store(tmp_path)
    with pytest.raises(CalibrationError, match=r"700 W .* 500 W"):
        store.begin(provenance("run2", 500.0))
    store.begin(provenance("run2", 700.4))
    store.begin(provenance("run3", None))

    path = tmp_path / "provenance.json"
    document = json.loads(path.read_text())
    document["runs"]["run2"]["power_limit_w"] = 450
    path.write_text(json.dumps(document))
    with pytest.raises(CalibrationError, match=r"700 W .* 450 W"):
        Store(tmp_path)


def test_only_valid_points_count_as_done(tmp_path):
    ops = [make_op("gemm", m=m, n=64, k=64) for m in (1, 2, 3)]
    filled(
        tmp_path,
        [
            sample(ops[0]),
            sample(ops[1], trial=trial(valid=False, reason="hot")),
            sample(ops[2], trial=None, reason="out of memory"),
        ],
    )
    assert Store(tmp_path).done == {sample_key("op", (ops[0],), BOARD)}


def test_the_key_follows_the_work_and_not_the_name():
    renamed = replace(GEMM, name="o", count=7, launches=2)
    assert sample().key == sample(renamed, label="o").key
    assert sample().key != sample(make_op("gemm", m=16, n=4096, k=4097)).key
    assert sample().key != sample(replace(GEMM, dtype="fp16")).key
    assert sample().key != sample(board_uuid="other").key
    mix = sample(block="mix", label="a", mode="eager")
    assert mix.key != replace(mix, mode="cuda_graph").key
    assert mix.key != replace(mix, label="b").key
    assert mix.key != replace(mix, ops=(GEMM.times(2),)).key
    assert mix.key != sample(label="a").key


def test_a_board_is_named_without_its_uuid():
    import hashlib

    assert board_hash("GPU-abc") == hashlib.sha256(b"GPU-abc").hexdigest()[:10]
    assert new_run_id("t", [BOARD], 0) != new_run_id("t", [BOARD], 1)


def test_an_op_sample_holds_one_op():
    with pytest.raises(SpecError, match="holds one op, not 2"):
        sample(ops=(GEMM, GEMM))
    with pytest.raises(SpecError, match="known: op, mix"):
        sample(block="kernel")
