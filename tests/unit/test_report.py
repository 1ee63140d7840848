"""Documents and tables: the contract's fields, nulls with reasons, readable quantities."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
from rich.console import Console, RenderableType

from energylens.meter.base import DeviceInfo
from energylens.report.facts import doctor_document, doctor_text, facts_text
from energylens.report.prediction import infeasible_document, prediction_document, prediction_table
from energylens.report.validation import validation_document, validation_table
from energylens.results import (
    Anchors,
    BoardAnchor,
    BreakdownRow,
    HostAnchor,
    Infeasible,
    Measurement,
    Memory,
    Prediction,
    Source,
)
from energylens.spec.system import Parallelism, Workload
from energylens.validate import validate

MakePrediction = Callable[..., Prediction]

PREDICTION_FIELDS = {
    "schema",
    "spec",
    "device",
    "engine",
    "parallelism",
    "workload",
    "feasible",
    "reason",
    "memory",
    "prefill",
    "decode",
    "request",
    "ttft_s",
    "tpot_s",
    "ttlt_s",
    "energy_per_prompt_j",
    "energy_per_token_j",
    "energy_per_request_j",
    "breakdown",
    "source",
    "bundles",
    "anchors",
}
SUMMARY_FIELDS = {
    "group",
    "n",
    "n_unpredicted",
    "latency_mape_pct",
    "energy_mape_pct",
    "energy_typical_mape_pct",
    "latency_bias_pct",
    "energy_bias_pct",
    "kendall_tau_energy",
    "latency_coverage_pct",
    "energy_coverage_pct",
}


def text_of(renderable: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(renderable)
    return out.getvalue()


def test_prediction_document_holds_the_contracts_fields(make_prediction: MakePrediction) -> None:
    document = json.loads(json.dumps(prediction_document(make_prediction()), allow_nan=False))
    assert set(document) >= PREDICTION_FIELDS
    assert document["schema"] == "energylens/prediction/v1"
    assert (document["feasible"], document["reason"]) == (True, None)
    assert document["parallelism"]["tp"] == document["parallelism"]["gpus"] == 2
    # The decode step that is reported: 512 + 11 / 2.
    assert document["workload"] == {
        "batch": 4,
        "prompt_len": 512,
        "gen_len": 11,
        "context_len": 517.5,
    }
    assert document["memory"]["fits"] is True
    assert document["source"] == "interpolated"
    assert document["bundles"][0]["provider"] == "torch"


def test_phase_power_is_per_gpu_and_total_power_the_sum(make_prediction: MakePrediction) -> None:
    prefill = prediction_document(make_prediction())["prefill"]
    assert prefill["mean_power_w"] == pytest.approx(40.0 / 0.05 / 2)
    assert prefill["total_power_w"] == pytest.approx(40.0 / 0.05)
    assert prefill["interval"]["level"] == 0.9
    assert prefill["interval"]["energy_j"] == pytest.approx([36, 44])


def test_derived_numbers_follow_their_definitions(make_prediction: MakePrediction) -> None:
    document = prediction_document(make_prediction())
    assert document["ttft_s"] == 0.05
    assert document["ttlt_s"] == 0.15
    assert document["tpot_s"] == pytest.approx((0.15 - 0.05) / 10)
    assert document["energy_per_prompt_j"] == 40 / 4
    assert document["energy_per_token_j"] == 6 / 4
    assert document["energy_per_request_j"] == 100 / 4
    assert document["null_reasons"] == {}


def test_breakdown_rows_name_kind_and_source(make_prediction: MakePrediction) -> None:
    row = prediction_document(make_prediction())["breakdown"][0]
    assert row["phase"] == "prefill"
    assert row["kind"] == "gemm"
    assert row["op"] == "gate_up"
    assert (row["count"], row["source"], row["share"]) == (32, "interpolated", 1.0)


def test_absent_numbers_are_null_with_a_reason(
    make_prediction: MakePrediction, make_phase: Callable[..., object]
) -> None:
    document = prediction_document(make_prediction({"decode": make_phase(clock_hz=None)}))
    assert (document["prefill"], document["ttft_s"], document["energy_per_request_j"]) == (
        None,
        None,
        None,
    )
    assert document["energy_per_token_j"] is not None
    assert set(document["null_reasons"]) == {
        "prefill",
        "request",
        "ttft_s",
        "tpot_s",
        "ttlt_s",
        "energy_per_prompt_j",
        "energy_per_request_j",
        "decode.clock_hz",
    }


def test_one_generated_token_has_no_tpot(make_prediction: MakePrediction) -> None:
    document = prediction_document(make_prediction(workload=Workload(gen_len=1)))
    assert document["tpot_s"] is None
    assert "gen_len is 1" in document["null_reasons"]["tpot_s"]


def test_anchors_appear_as_the_anchor_contract_has_them(make_prediction: MakePrediction) -> None:
    board = BoardAnchor(
        board_uuid="u", device="h200", idle_w=120, stream_w=600, gemm_tflops=650, gemm_w=690
    )
    anchors = Anchors(boards=(board,), host=HostAnchor(launch_us=4.0))
    document = prediction_document(replace(make_prediction(), anchors=anchors))["anchors"]
    assert document["boards"][0]["stream_w"] == 600
    assert document["host"]["launch_us"] == 4.0


def test_infeasible_document_has_the_same_fields_and_no_numbers() -> None:
    memory = Memory(
        weights_bytes=141e9,
        kv_cache_bytes=1e9,
        activations_bytes=0,
        reserve_bytes=1e9,
        capacity_bytes=141e9,
    )
    document = infeasible_document(
        Infeasible(reason="does not fit; use tp 2", memory=memory),
        spec="toy",
        device="h200",
        engine="hf",
        parallelism=Parallelism(),
        workload=Workload(),
    )
    assert set(document) >= PREDICTION_FIELDS
    assert (document["feasible"], document["reason"]) == (False, "does not fit; use tp 2")
    assert document["memory"]["fits"] is False
    assert (document["prefill"], document["ttft_s"], document["source"]) == (None, None, None)


def test_validation_document_holds_the_contracts_fields(
    make_prediction: MakePrediction, make_measurement: Callable[..., Measurement]
) -> None:
    result = validate(
        [make_measurement("a", regime="host"), make_measurement("b", spec="nope")],
        lambda m, anchors: "unknown spec 'nope'" if m.spec == "nope" else make_prediction(),
        by=("spec",),
    )
    document = json.loads(json.dumps(validation_document(result), allow_nan=False))
    assert document["schema"] == "energylens/validation/v1"
    good, bad = document["rows"]
    assert set(good) >= {"record_id", "latency_s", "energy_j", "source", "regime", "reason"}
    assert set(good["energy_j"]) >= {
        "measured",
        "predicted",
        "predicted_typical",
        "error_pct",
        "within_interval",
    }
    assert (good["regime"], good["source"], good["reason"]) == ("host", "interpolated", None)
    assert good["energy_j"]["error_pct"] == pytest.approx(20)
    assert (bad["latency_s"]["predicted"], bad["reason"]) == (None, "unknown spec 'nope'")
    assert [s["group"] for s in document["summary"]] == [{}, {"spec": "toy"}, {"spec": "nope"}]
    assert all(set(s) == SUMMARY_FIELDS for s in document["summary"])


def test_prediction_table_shows_each_quantity_with_its_interval(
    make_prediction: MakePrediction,
) -> None:
    text = text_of(prediction_table(make_prediction()))
    assert "toy on 2 x h200, engine hf, tp 2: batch 4, prompt 512, generate 11" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.split()}
    assert "50.0 ms" in lines["TTFT"]
    assert "45.0 .. 55.0 ms" in lines["TTFT"]
    # 6 J a step over a batch of 4, with 10 % on either side.
    assert "1.50 J" in lines["J/token"]
    assert "1.35 .. 1.65 J" in lines["J/token"]
    assert "memory per GPU: weights 70.00 + KV cache 2.00" in text
    assert "74.00 of 141.00 GB, fits" in text
    assert "gate_up" in text
    assert "75 %" in text
    assert text.rstrip().endswith(
        "device h200 (typical boards), engine hf, bundle h200/torch 1, weakest source: interpolated"
    )


def test_prediction_table_of_one_phase_holds_only_its_rows(
    make_prediction: MakePrediction, make_phase: Callable[..., object]
) -> None:
    text = text_of(prediction_table(make_prediction({"prefill": make_phase(2e-5, 0.004)})))
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.split()}
    assert lines["TTFT"][1:3] == ["20.0", "µs"]
    assert "TTLT" not in text
    assert "1.00 mJ" in text


def test_a_decode_step_alone_shows_its_latency(
    make_prediction: MakePrediction, make_phase: Callable[..., object]
) -> None:
    text = text_of(prediction_table(make_prediction({"decode": make_phase(0.01, 6.0)})))
    (line,) = (line for line in text.splitlines() if line.startswith(" decode step"))
    assert "10.0 ms" in line
    assert "9.00 .. 11.0 ms" in line


def test_the_breakdown_joins_twins_and_small_ops_and_keeps_the_totals(
    make_prediction: MakePrediction,
) -> None:
    p = make_prediction()
    (row,) = (r for r in p.breakdown if r.phase == "prefill")  # 50 ms, 40 J

    def part(op: str, share: float, **changes: object) -> BreakdownRow:
        return replace(
            row, op=op, share=share, energy_j=40 * share, latency_s=0.05 * share, **changes
        )

    rows = (
        part("down", 0.3),
        part("gate", 0.345),
        part("tiny", 0.005, source=Source.EXTRAPOLATED),
        part("up", 0.345),
        part("small", 0.005, limit_share=0.1),
    )
    text = text_of(prediction_table(replace(p, breakdown=rows)))
    start = text.index("prefill, by energy")
    lines = text[start : text.index("decode, by energy")].splitlines()[4:]
    twins, down, small = (" ".join(line.split()) for line in lines if line.strip())
    assert twins == "gate, up interpolated 64 34.5 ms 27.6 J 69.0 % 75 %"
    assert down == "down interpolated 32 15.0 ms 12.0 J 30.0 % 75 %"
    assert small == "2 smaller ops extrapolated 64 500 µs 400 mJ 1.0 % -"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (0, "(typical boards)"),
        (1, "(1 of 2 boards anchored, anchored host)"),
        (2, "(anchored b0 and b1, anchored host)"),
        (3, "(anchored b0 and b1, anchored host)"),
    ],
)
def test_the_last_line_says_whose_boards_are_meant(
    make_prediction: MakePrediction, given: int, told: str
) -> None:
    boards = tuple(
        BoardAnchor(
            board_uuid=f"b{i}", device="h200", idle_w=1, stream_w=2, gemm_tflops=3, gemm_w=4
        )
        for i in range(given)
    )
    anchors = Anchors(boards=boards, host=HostAnchor(launch_us=4.0)) if given else None
    assert told in text_of(prediction_table(replace(make_prediction(), anchors=anchors)))
    # Without a calibration, anchors have nothing to stand on and are not used.
    bare = replace(make_prediction(), anchors=anchors, bundles=())
    assert "(typical boards)" in text_of(prediction_table(bare))


def test_validation_table_shows_summary_groups_reasons_and_rows(
    make_prediction: MakePrediction, make_measurement: Callable[..., Measurement]
) -> None:
    result = validate(
        [
            make_measurement("run-a-first"),
            make_measurement("run-a-second", regime="host"),
            make_measurement("other", spec="nope"),
        ],
        lambda m, anchors: "unknown spec 'nope'" if m.spec == "nope" else make_prediction(),
        by=("phase", "tp"),
    )
    lines = text_of(validation_table(result)).splitlines()
    assert lines[0].startswith("device-bound, 1 of 2 rows predicted: latency MAPE 0.0 % (100 %")
    assert lines[1].startswith("host-bound, 1 of 1 rows predicted: ")
    cells = [line.split() for line in lines]
    assert ["decode", "1", "2", "of", "3"] in [c[:5] for c in cells]
    assert "not predicted, other: unknown spec 'nope'" in lines
    assert ["run-a-...", "regime"] in [c[:2] for c in cells]
    (first,) = (c for c in cells if c[:1] == ["first"])
    assert first[-3:] == ["+20.0", "%", "*"]  # 5 J measured, 5.4 to 6.6 J predicted
    assert lines[-1] == "bundle h200/torch 1, rows by weakest source: 2 interpolated"


@pytest.mark.parametrize(
    ("facts", "lines"),
    [
        ({"schema": "x", "a": None, "b": 1.23456, "c": []}, ["a: -", "b: 1.235", "c: none"]),
        ({"a": {"b": [1, 2.5]}}, ["a:", "  b: 1, 2.5"]),
        (
            {"rows": [{"name": "long", "n": 1}, {"name": "x", "n": 100}]},
            ["rows:", "  name    n", "  long    1", "  x     100"],
        ),
        ({"rows": [{"a": 1}, {"b": {"c": 2}}]}, ["rows:", "  a: 1", "  b:", "    c: 2"]),
    ],
)
def test_facts_are_indented_lines_and_like_records_columns(
    facts: dict[str, object], lines: list[str]
) -> None:
    assert facts_text(facts).splitlines() == lines


def test_doctor_says_per_board_what_works_and_why_not() -> None:
    board = asdict(DeviceInfo(uuid="GPU-1", name="NVIDIA H200", power_limit_w=700.0))
    document = doctor_document(
        {
            "python": "3.11.7",
            "platform": "Linux",
            "tegra": None,
            "libraries": (("torch", False), ("pynvml", True)),
            "meter_error": None,
            "devices": (board,),
            "visible": (),
            "capabilities": (
                {
                    "uuid": "GPU-1",
                    "sensor": "energy",
                    "state": "not_supported",
                    "reason": "old board",
                    "scope": None,
                },
            ),
            "host": (
                {
                    "uuid": "package-0",
                    "sensor": "energy",
                    "state": "supported",
                    "reason": None,
                    "scope": "cpu_pkg",
                },
            ),
            "calibrate_blockers": ("no board is visible to CUDA",),
            "hints": ("show the board to CUDA",),
        }
    )
    assert document["schema"] == "energylens/doctor/v1"
    assert document["libraries"] == {"torch": False, "pynvml": True}
    assert doctor_text(document).splitlines() == [
        "python 3.11.7 on Linux",
        "predict, validate, list: work",
        "calibrate: no, no board is visible to CUDA",
        "libraries: torch no, pynvml yes",
        "NVIDIA H200 GPU-1, power limit 700 W, hidden from CUDA",
        "  energy: not_supported (old board)",
        "host package-0 energy: supported (cpu_pkg)",
        "to do: show the board to CUDA",
    ]
