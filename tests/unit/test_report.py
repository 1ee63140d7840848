"""Documents and tables: the contract's fields, nulls with reasons, readable quantities."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from energylens.report import (
    doctor_document,
    doctor_text,
    infeasible_document,
    prediction_document,
    prediction_table,
    validation_document,
    validation_table,
)
from energylens.results import (
    Anchors,
    BoardAnchor,
    HostAnchor,
    Infeasible,
    Measurement,
    Memory,
    Prediction,
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
    assert "50 ms" in lines["TTFT"]
    assert "45 ms .. 55 ms" in lines["TTFT"]
    # 6 J a step over a batch of 4, with 10 % on either side.
    assert "1.5 J" in lines["J/token"]
    assert "1.35 J .. 1.65 J" in lines["J/token"]
    assert "memory per GPU: weights 70.00 + KV cache 2.00" in text
    assert "74.00 of 141.00 GB, fits" in text
    assert "gate_up" in text
    assert "75 %" in text
    assert text.rstrip().endswith(
        "device h200 (a typical board), engine hf, bundle h200/torch 1, "
        "weakest source: interpolated"
    )


def test_prediction_table_of_one_phase_leaves_the_others_blank(
    make_prediction: MakePrediction, make_phase: Callable[..., object]
) -> None:
    text = text_of(prediction_table(make_prediction({"prefill": make_phase(2e-5, 0.004)})))
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.split()}
    assert lines["TTFT"][1:3] == ["20", "µs"]
    assert lines["TTLT"][1:] == ["-", "-", "-"]
    assert "1 mJ" in text


def test_validation_table_shows_rows_reasons_and_summary(
    make_prediction: MakePrediction, make_measurement: Callable[..., Measurement]
) -> None:
    result = validate(
        [make_measurement("first"), make_measurement("second", spec="nope")],
        lambda m, anchors: "unknown spec 'nope'" if m.spec == "nope" else make_prediction(),
        by=("phase",),
    )
    text = text_of(validation_table(result))
    assert "first" in text
    assert "+20.0 % *" in text  # 5 J measured, 5.4 to 6.6 J predicted
    assert "not predicted, 1 rows: unknown spec 'nope'" in text
    assert "phase=decode" in text


def test_doctor_says_per_board_what_works_and_why_not() -> None:
    board = {"uuid": "GPU-1", "name": "NVIDIA H200", "power_limit_w": 700.0}
    document = doctor_document(
        {
            "python": "3.11.7",
            "platform": "Linux",
            "tegra": None,
            "libraries": (("torch", False), ("pynvml", True)),
            "nvml_error": None,
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
            "hints": ("show the board to CUDA",),
        }
    )
    assert document["schema"] == "energylens/doctor/v1"
    assert document["libraries"] == {"torch": False, "pynvml": True}
    assert doctor_text(document).splitlines() == [
        "python 3.11.7 on Linux",
        "libraries: torch no, pynvml yes",
        "Jetson: no",
        "NVML: works",
        "NVIDIA H200 GPU-1, power limit 700 W, hidden from CUDA",
        "  energy: not_supported (old board)",
        "hint: show the board to CUDA",
    ]
