"""Mixtures of experts from the spec to the command line: sharding, memory, imbalance, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from command import Capture, error_of, run_json

from energylens.cli import main
from energylens.errors import SpecError
from energylens.graph import Op
from energylens.lower import Lowered, lower, memory, parameters
from energylens.predict import Catalogue, predict
from energylens.results import Anchors, BoardAnchor, Infeasible, Memory, PhaseResult, Prediction
from energylens.spec.load import load_spec
from energylens.spec.resources import data_dir
from energylens.spec.system import Config, Mode, Parallelism, Phase, Step, Workload

CATALOGUE = Catalogue()
H200 = CATALOGUE.device("h200")
HF, VLLM = CATALOGUE.engine("hf"), CATALOGUE.engine("vllm")
QWEN, MIXTRAL = CATALOGUE.spec("qwen3_moe"), CATALOGUE.spec("mixtral_8x7b")
LAYERS, WIDTH, HIDDEN, EXPERTS, TOPK = 48, 2048, 768, 128, 8  # of Qwen3-30B-A3B

MODEL = ("predict", "qwen3_moe", "--phase", "decode", "--batch", "8")

pytestmark = pytest.mark.usefixtures("no_debug")


def write(folder: Path, *lines: str) -> str:
    path = folder / "routing.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def lowered(spec: Any = QWEN, engine: Any = VLLM, tp: int = 1, ep: int = 1, **more: Any) -> Lowered:
    found = lower(spec, engine, Parallelism(tp=tp, ep=ep), **more)
    assert isinstance(found, Lowered), found
    return found


def ops_of(found: Lowered, tokens: int = 64, worker: int = 0) -> dict[str, Op]:
    return {o.name: o for o in found.ops(Step.prefill(1, tokens, Mode.EAGER), worker)}


def held(found: Lowered) -> Memory:
    return memory(found, Workload(), H200)


# ---------------------------------------------------------------- Mixtral-8x7B


def test_mixtral_has_the_parameters_of_its_checkpoint() -> None:
    # model.safetensors.index.json of mistralai/Mixtral-8x7B-v0.1: 93,405,585,408 bytes of bf16.
    assert parameters(MIXTRAL) == 46_702_792_704 == 93_405_585_408 / 2


def test_mixtral_is_what_its_config_says() -> None:
    assert dict(MIXTRAL.ranks) == {
        "m": 4096, "g": 8, "r": 4, "d": 128, "e": 8, "f": 14336, "v": 32000,
    }  # fmt: skip
    assert MIXTRAL.moe is not None
    assert (MIXTRAL.moe["rank"], MIXTRAL.moe["topk"]) == ("e", 2)
    assert [b.repeat for b in MIXTRAL.blocks] == [1, 32, 1]


def test_two_of_eight_experts_are_active_for_a_token() -> None:
    # 12.9 B active parameters, as published: all but 6 of 8 experts.
    expert = 3 * 4096 * 14336
    assert parameters(MIXTRAL) - 32 * 6 * expert == pytest.approx(12.88e9, rel=1e-3)
    experts = ops_of(lowered(MIXTRAL), tokens=1)["experts"]
    assert experts.flops == pytest.approx(2 * 2 * expert)
    assert experts.sizes["active"] == pytest.approx(2)


@pytest.mark.parametrize("engine", [HF, VLLM], ids=["hf", "vllm"])
def test_mixtral_fits_two_boards_and_is_predicted(engine: Any) -> None:
    assert held(lowered(MIXTRAL, engine, tp=2)).fits
    found = predict(
        MIXTRAL,
        engine=engine,
        device=H200,
        config=Config(parallelism=Parallelism(tp=2, ep=2)),
        bundles=CATALOGUE.bundles(H200, engine),
        phases=(Phase.DECODE,),
        link=CATALOGUE.link(H200, 2),
    )
    assert isinstance(found, Prediction)
    assert found.imbalance["decode"].experts == 8


# ---------------------------------------------------------------- sharding, by hand


def test_without_expert_parallelism_every_expert_is_sliced() -> None:
    found = lowered(tp=2)
    assert found.sharding.ways == {"g": 2, "f": 2, "v": 2}
    sizes = ops_of(found)["experts"].sizes
    assert (sizes["experts"], sizes["hidden"], sizes["width"]) == (128, 384, 2048)
    assert sizes["rows"] == pytest.approx(64 * TOPK)
    assert len(found.by_worker(Step.decode(8, 100, Mode.EAGER))) == 1


def test_four_workers_in_two_groups_hold_half_the_experts_in_halves() -> None:
    found = lowered(tp=4, ep=2)
    assert found.sharding.ways == {"g": 4, "e": 2, "f": 2, "v": 4}
    ops = ops_of(found)
    sizes = ops["experts"].sizes
    assert (sizes["experts"], sizes["hidden"]) == (64, 384)
    assert ops["attention"].sizes["q_heads"] == 8
    assert ops["down_all_reduce"].sizes == {"values": 64 * WIDTH, "workers": 4}
    # Two groups of two workers: pairs of all four are those of two, twice.
    by_worker = found.by_worker(Step.prefill(1, 64, Mode.EAGER))
    rows = [next(o for o in own if o.name == "experts").sizes["rows"] for own in by_worker]
    assert rows[0] == rows[2] > rows[1] == rows[3]
    assert sum(rows) == pytest.approx(2 * 64 * TOPK)


def test_weights_of_a_worker_by_hand() -> None:
    # Values of a layer: q and o of 32 heads, k and v of 4, two norms of the width, two of a head,
    # the router, and three matrices an expert; embedding, head and the last norm beside them.
    q_o, k_v = 2 * WIDTH * 32 * 128, 2 * WIDTH * 4 * 128
    norms, router, expert = 2 * WIDTH + 2 * 128, WIDTH * EXPERTS, 3 * WIDTH * HIDDEN
    vocabulary = 151936 * WIDTH

    def layer(attention: int, experts: float) -> float:
        return LAYERS * ((q_o + k_v) / attention + norms + router + experts * expert)

    whole = 2 * (layer(1, EXPERTS) + 2 * vocabulary + WIDTH)
    assert held(lowered()).weights_bytes == whole == 2 * parameters(QWEN)
    vllm = {
        (2, 1): 2 * (layer(2, EXPERTS / 2) + vocabulary + WIDTH),
        (2, 2): 2 * (layer(2, 64) + vocabulary + WIDTH),
        (4, 2): 2 * (layer(4, 64 / 2) + vocabulary / 2 + WIDTH),
    }
    for (tp, ep), expected in vllm.items():
        assert held(lowered(tp=tp, ep=ep)).weights_bytes == expected, (tp, ep)
    # transformers spreads the experts and leaves all else whole, the embedding and the head too.
    replicated = 2 * (layer(1, 32) + 2 * vocabulary + WIDTH)
    assert held(lowered(engine=HF, tp=4, ep=4)).weights_bytes == replicated


def test_experts_of_transformers_leave_attention_whole() -> None:
    found = lowered(engine=HF, tp=2, ep=2)
    assert found.sharding.ways == {"e": 2}
    ops = ops_of(found)
    assert (ops["attention"].sizes["q_heads"], ops["attention"].sizes["kv_heads"]) == (32, 4)
    assert ops["experts"].sizes["experts"] == 64
    assert [name for name in ops if "all_" in name] == ["down_all_reduce"]
    assert ops_of(lowered(engine=HF, tp=2))["attention"].sizes["q_heads"] == 16


def test_experts_that_do_not_divide_are_uneven() -> None:
    # Six workers do not divide the heads, which transformers leaves whole.
    found = lowered(engine=HF, tp=6, ep=6)
    by_worker = found.by_worker(Step.prefill(1, 64, Mode.EAGER))
    sizes = [next(o for o in own if o.name == "experts").sizes for own in by_worker]
    assert sorted(s["experts"] for s in sizes) == [21, 21, 21, 21, 22, 22]
    assert sum(s["rows"] for s in sizes) == pytest.approx(64 * TOPK)
    expert = LAYERS * 3 * WIDTH * HIDDEN * 2
    spread = held(lowered(engine=HF)).weights_bytes - held(found).weights_bytes
    assert spread == (EXPERTS - 22) * expert  # memory is that of the worker with the most


def test_experts_held_twice_take_room() -> None:
    expert = LAYERS * 3 * WIDTH * HIDDEN * 2
    plain, four, one = (
        held(lowered(tp=2, ep=2, redundant_experts=n)).weights_bytes for n in (0, 4, 1)
    )
    assert four - plain == 2 * expert
    assert one - plain == expert  # of the worker that has it
    sizes = ops_of(lowered(tp=2, ep=2, redundant_experts=4))["experts"].sizes
    assert sizes["experts"] == 66


@pytest.mark.parametrize(
    ("model", "degrees", "copies"),
    [
        ("qwen3_moe", {"tp": 2, "ep": 2}, -1),
        ("qwen3_moe", {"tp": 2, "ep": 2}, 129),
        ("qwen3_moe", {"tp": 2}, 4),  # one group holds every expert
        ("llama3_8b", {"tp": 2}, 4),
    ],
)
def test_experts_that_cannot_be_held_twice_are_refused(model, degrees, copies) -> None:
    with pytest.raises(SpecError, match="redundant"):
        lower(load_spec(model), VLLM, Parallelism(**degrees), redundant_experts=copies)


# ---------------------------------------------------------------- imbalance


def test_imbalance_is_in_the_document_by_phase(capsys: Capture) -> None:
    arguments = ("predict", "qwen3_moe", "--tp", "2", "--ep", "2", "--batch", "16")
    document = run_json(capsys, *arguments, "--routing", "zipf:1.2")
    assert document["routing"] == "zipf:1.2"
    assert set(document["imbalance"]) == {"prefill", "decode"}
    decode = document["imbalance"]["decode"]
    assert decode["experts"] == 128
    assert 40 < decode["experts_touched"] < 60
    assert decode["load_max_over_mean"] > 1.05
    assert decode["expert_max_over_mean"] > 10
    assert decode["waiting_j"] > 0
    uniform = run_json(capsys, *arguments)
    assert uniform["routing"] == "uniform"
    touched = uniform["imbalance"]["decode"]["experts_touched"]
    assert touched == pytest.approx(128 * (1 - (1 - 8 / 128) ** 16), rel=0.01)
    dense = run_json(capsys, "predict", "llama3_8b", "--phase", "decode")
    assert dense["routing"] is None
    assert dense["imbalance"] is None


def test_imbalance_is_a_line_of_the_table(capsys: Capture) -> None:
    assert main([*MODEL, "--tp", "2", "--ep", "2", "--routing", "zipf:1.2"]) == 0
    out = capsys.readouterr().out
    (line,) = [text for text in out.splitlines() if text.startswith("experts in ")]
    assert line.startswith("experts in decode (zipf:1.2): ")
    assert " of 128 touched, fullest worker 1." in line
    assert line.endswith("spent waiting")
    assert main(["predict", "llama3_8b", "--phase", "decode"]) == 0
    assert "experts in" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "degrees", [("--tp", "4"), ("--tp", "2", "--ep", "2", "--routing", "zipf:1.2")]
)
@pytest.mark.parametrize("engine", ["vllm", "hf"])
def test_a_mixture_is_answered_with_slices_and_with_whole_experts(
    capsys: Capture, degrees: tuple[str, ...], engine: str
) -> None:
    document = run_json(capsys, "predict", "qwen3_moe", *degrees, "--engine", engine)
    assert document["feasible"] is True
    assert document["request"]["energy_j"] > document["prefill"]["energy_j"] > 0
    experts = [r for r in document["breakdown"] if r["op"] == "experts"]
    assert {r["kind"] for r in experts} == {"moe"}
    assert sum(r["share"] for r in experts) > 0


def anchor(uuid: str) -> BoardAnchor:
    return BoardAnchor(
        board_uuid=uuid,
        device="h200",
        idle_w=120.0,
        stream_w=620.0,
        gemm_tflops=660.0,
        gemm_w=688.0,
        gemm_mhz=1460.0,
        gemv_gbs=4250.0,
    )


def waiting_j(routing: str, ep: int, phase: Phase, boards: int = 2) -> float:
    """Joules spent waiting on boards that are alike."""
    found = predict(
        QWEN,
        engine=VLLM,
        device=H200,
        config=Config(parallelism=Parallelism(tp=2, ep=ep), routing=routing),
        workload=Workload(batch=16, prompt_len=512),
        bundles=CATALOGUE.bundles(H200, VLLM),
        anchors=Anchors(boards=(anchor("a"),) * boards),
        phases=(phase,),
        link=CATALOGUE.link(H200, 2),
    )
    assert isinstance(found, Prediction)
    return found.imbalance[str(phase)].waiting_j


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_the_slowest_board_is_the_fullest_wherever_it_is_named(phase: Phase) -> None:
    slow = replace(anchor("slow"), gemv_gbs=3800.0, gemm_mhz=1380.0)
    others = [replace(anchor(uuid), idle_w=120.0 + i) for i, uuid in enumerate("abc")]

    def result(*boards: BoardAnchor) -> PhaseResult:
        found = predict(
            QWEN,
            engine=VLLM,
            device=H200,
            config=Config(parallelism=Parallelism(tp=4, ep=2), routing="zipf:1.5"),
            workload=Workload(batch=64),
            bundles=CATALOGUE.bundles(H200, VLLM),
            anchors=Anchors(boards=boards),
            phases=(phase,),
            link=CATALOGUE.link(H200, 4),
        )
        assert isinstance(found, Prediction)
        return found.phases[str(phase)]

    alike = result(*(anchor(uuid) for uuid in "abcd"))
    first, last = result(slow, *others), result(*reversed(others), slow)
    assert first.latency_s == pytest.approx(last.latency_s, rel=1e-9)
    assert first.energy_j == pytest.approx(last.energy_j, rel=1e-9)
    assert first.latency_s > alike.latency_s * 1.002


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_nobody_waits_for_an_equal_board_with_equal_work(phase: Phase) -> None:
    assert waiting_j("uniform", 1, phase) == pytest.approx(0, abs=1e-9)
    assert waiting_j("zipf:1.5", 1, phase) == pytest.approx(0, abs=1e-9)  # all slices are alike


def test_more_energy_is_spent_waiting_the_more_skewed_the_experts_are() -> None:
    names = ("uniform", "zipf:0.5", "zipf:1", "zipf:1.5")
    waits = [waiting_j(name, 2, Phase.PREFILL) for name in names]
    assert waits[0] > 0  # by chance alone
    assert waits == sorted(waits)
    assert waits[-1] > 5 * waits[0]
    # Few tokens read weights, and the more they agree the fewer: no one waits longer.
    assert 0 < waiting_j("zipf:1.5", 2, Phase.DECODE) < waits[-1] / 20


def test_a_step_of_a_recorded_trace_reads_fewer_experts_than_its_histogram(
    capsys: Capture, tmp_path: Path
) -> None:
    tokens = [range(8 * run, 8 * run + 8) for run in range(16) for _ in range(16)]
    recorded = write(tmp_path, *(" ".join(map(str, ids)) for ids in tokens))
    trace = run_json(capsys, *MODEL, "--routing", f"trace:{recorded}")
    counted = write(tmp_path, *["16"] * 128)
    histogram = run_json(capsys, *MODEL, "--routing", f"histogram:{counted}")
    assert trace["routing"].startswith("trace:")
    touched, all_of_them = (d["imbalance"]["decode"]["experts_touched"] for d in (trace, histogram))
    # Eight consecutive tokens are of one run or of two; chosen independently they touch 51.6.
    assert 8 <= touched <= 16
    assert all_of_them == pytest.approx(128 * (1 - (1 - 8 / 128) ** 8), rel=1e-6)
    assert trace["decode"]["latency_s"] < histogram["decode"]["latency_s"]
    assert trace["decode"]["energy_j"] < histogram["decode"]["energy_j"]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("routing", "said"),
    [
        ("skewed", "unknown routing 'skewed'; allowed: uniform, zipf:ALPHA, dirichlet:C"),
        ("zipf:-1", "routing 'zipf:-1': found '-1'; allowed: a number above 0"),
        ("zipf", "routing 'zipf': found 'nothing'; allowed: a number above 0"),
        ("uniform:1", "uniform has no parameter"),
        ("histogram:", "allowed: the name of a file"),
        ("histogram:/no/such/file", "/no/such/file: cannot be read as text"),
    ],
)
def test_a_routing_that_cannot_be_is_bad_input(capsys: Capture, routing: str, said: str) -> None:
    assert said in error_of(capsys, *MODEL, "--routing", routing)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["1"] * 127, "127 lines with numbers, and the model has 128 experts"),
        (["1"] * 127 + ["-1"], ":128: found -1; allowed: numbers from 0 on"),
        (["0"] * 128, "a column without any token"),
        (["1"] * 127 + ["one"], ":128: found 'one'; allowed: numbers"),
    ],
)
def test_a_histogram_that_cannot_be_is_bad_input(
    capsys: Capture, tmp_path: Path, lines: list[str], said: str
) -> None:
    file = write(tmp_path, *lines)
    assert said in error_of(capsys, *MODEL, "--routing", f"histogram:{file}")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("0 1 2 3 4 5 6 128", ":2: expert id 128; allowed: 0 to 127"),
        ("0 1 2 3 4 5 6 -1", ":2: expert id -1; allowed: 0 to 127"),
        ("0 1 2 3 4 5 6 6", ":2: a token needs 8 different expert ids"),
        ("0 1 2 3 4 5 6", ":2: a token needs 8 different expert ids"),
        ("0 1 2 3 4 5 6 7 8", ":2: a token needs 8 different expert ids"),
        ("0 1 2 3 4 5 6 nan", ":2: a token needs 8 different expert ids"),
    ],
)
def test_a_trace_that_cannot_be_is_bad_input(
    capsys: Capture, tmp_path: Path, line: str, said: str
) -> None:
    file = write(tmp_path, "0 1 2 3 4 5 6 7", line)
    assert said in error_of(capsys, *MODEL, "--routing", f"trace:{file}")


def test_a_spec_cannot_choose_more_experts_than_it_has(capsys: Capture, tmp_path: Path) -> None:
    fields = yaml.safe_load((data_dir("specs") / "mixtral_8x7b.yaml").read_text(encoding="utf-8"))
    fields["moe"]["topk"] = 9
    file = tmp_path / "greedy.yaml"
    file.write_text(yaml.safe_dump(fields), encoding="utf-8")
    assert "moe.topk: found 9; allowed: 1 to 8, the size of rank 'e'" in error_of(
        capsys, "predict", str(file)
    )


def test_a_spec_may_say_how_its_tokens_are_routed(capsys: Capture, tmp_path: Path) -> None:
    fields = yaml.safe_load((data_dir("specs") / "mixtral_8x7b.yaml").read_text(encoding="utf-8"))
    fields["moe"]["routing"] = {"kind": "dirichlet", "c": 0.5}
    file = tmp_path / "skewed.yaml"
    file.write_text(yaml.safe_dump(fields), encoding="utf-8")
    spec = load_spec(str(file))
    assert spec.moe is not None
    assert spec.moe["routing"] == MappingProxyType({"kind": "dirichlet", "c": 0.5})
    arguments = ("predict", str(file), "--tp", "2", "--phase", "decode")
    assert run_json(capsys, *arguments)["routing"] == "dirichlet:0.5"
    assert run_json(capsys, *arguments, "--routing", "uniform")["routing"] == "uniform"


def test_degrees_that_cannot_be_are_bad_input(capsys: Capture) -> None:
    assert "ep=3 must divide tp*dp" in error_of(capsys, *MODEL, "--tp", "2", "--ep", "3")
    assert "ep=2 must divide tp*dp" in error_of(capsys, *MODEL, "--ep", "2")
    assert "ep must be at least 1" in error_of(capsys, *MODEL, "--ep", "0")


def test_more_groups_than_experts_are_infeasible(capsys: Capture) -> None:
    arguments = ("predict", "mixtral_8x7b", "--tp", "16", "--ep", "16")
    text = error_of(capsys, *arguments, code=3)
    assert "mixtral_8x7b: ep=16 is more than its 8 experts" in text
    found = lower(MIXTRAL, HF, Parallelism(tp=16, ep=16))
    assert isinstance(found, Infeasible)


def test_slices_that_do_not_divide_an_expert_are_infeasible() -> None:
    found = lower(QWEN, HF, Parallelism(tp=10, ep=2))
    assert isinstance(found, Infeasible)
    assert "ep=2 does not divide f=768 of each expert 5 ways" in found.reason


def test_a_dense_model_has_nothing_to_route_or_to_spread(capsys: Capture) -> None:
    dense = ("predict", "llama3_8b")
    text = error_of(capsys, *dense, "--routing", "uniform")
    assert "llama3_8b has no experts; leave the routing out" in text
    text = error_of(capsys, *dense, "--tp", "2", "--ep", "2", code=3)
    assert "llama3_8b has no experts for ep=2 to spread; use ep=1" in text
