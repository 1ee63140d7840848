"""The vLLM profile: fused projections, additions inside the norms, new tokens into the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from energylens.cli import main
from energylens.cost.bundle import HostLaw, select
from energylens.errors import SpecError
from energylens.graph import SPLIT_TOKENS
from energylens.lower import lower_step
from energylens.predict import Catalogue, predict
from energylens.results import Anchors, HostAnchor, Kind, Prediction
from energylens.spec.machines import load_engine
from energylens.spec.system import (
    Config,
    Engine,
    Mode,
    Parallelism,
    Phase,
    Sequences,
    Step,
    Workload,
)

CATALOGUE = Catalogue()
VLLM = CATALOGUE.engine("vllm")


def layer_ops(spec, step, tp=1):
    ops = lower_step(CATALOGUE.spec(spec), VLLM, Parallelism(tp=tp), step)
    return {o.name: o for o in ops}


def test_projections_are_fused_and_additions_absorbed():
    ops = layer_ops("llama3_8b", Step.prefill(2, 512, Mode.SERVING))
    assert ops["q+k+v"].shape == (1024, (32 + 2 * 8) * 128, 4096)
    assert ops["gate+up"].shape == (1024, 2 * 14336, 4096)
    assert not {"attn_residual", "mlp_residual"} & set(ops)
    assert ops["attn_norm"].kernel == "vllm_add_rmsnorm"
    assert ops["sample"].kernel == "vllm_sample"


def test_decode_reads_grouped_heads_and_writes_new_tokens_only():
    ops = layer_ops("llama3_8b", Step.decode(16, 1025, Mode.SERVING), tp=2)
    assert ops["attention"].shape == (16, 1, 1025, 16, 4, 128)
    assert "repeat_kv" not in ops
    # K and V of 16 tokens, 4 local heads of 128 values of two bytes.
    assert ops["kv_append"].bytes_written == 2 * 16 * 4 * 128 * 2
    assert {"o_all_reduce", "down_all_reduce", "lm_head_all_gather"} <= set(ops)


def test_the_embedding_is_split_over_the_vocabulary_and_reduced():
    ops = layer_ops("llama3_8b", Step.decode(4, 100, Mode.SERVING), tp=2)
    assert ops["embed_all_reduce"].sizes["values"] == 4 * 4096


# ---------------------------------------------------------------- captured sizes


def rows(ops) -> dict[str, float]:
    """Rows of each op: tokens or sequences, whatever its kernel counts in."""
    found = {}
    for name, op in ops.items():
        s = op.sizes
        found[name] = s.get("rows") or s.get("m") or s["batch"] * s["new"]
    return found


def test_decode_of_17_sequences_runs_24_rows_and_attends_for_17() -> None:
    found = rows(layer_ops("llama3_8b", Step.decode(17, 1000, Mode.SERVING)))
    seventeen = {"kv_append", "attention", "lm_head", "sample"}
    assert {name for name, n in found.items() if n == 17} == seventeen
    assert {n for name, n in found.items() if name not in seventeen} == {24}
    assert {"q+k+v", "rope", "o", "attn_norm", "mlp_norm", "gate+up", "act", "down"} <= set(found)


def test_padded_rows_are_reduced_and_real_logits_gathered() -> None:
    ops = layer_ops("llama3_8b", Step.decode(17, 1000, Mode.SERVING), tp=2)
    for name in ("embed_all_reduce", "o_all_reduce", "down_all_reduce"):
        assert ops[name].sizes["values"] == 24 * 4096
    assert ops["lm_head_all_gather"].sizes["values"] == 17 * 128256


@pytest.mark.parametrize("batch", [24, 512, 513, 600])
def test_a_captured_size_and_what_is_above_the_last_one_is_not_padded(batch: int) -> None:
    found = rows(layer_ops("llama3_8b", Step.decode(batch, 100, Mode.SERVING)))
    assert set(found.values()) == {batch}


def test_a_small_prefill_and_a_mixed_step_are_padded_too() -> None:
    ops = layer_ops("llama3_8b", Step.prefill(1, 500, Mode.SERVING))
    assert (ops["gate+up"].sizes["m"], ops["attention"].sizes["new"]) == (512, 500)
    sequences = (Sequences(count=3, new=1, context=90), Sequences(count=1, new=30, context=30))
    mixed = Step(sequences=sequences, mode=Mode.SERVING)
    lowered = lower_step(CATALOGUE.spec("llama3_8b"), VLLM, Parallelism(), mixed)
    assert [o.sizes["m"] for o in lowered if o.name == "gate+up"] == [40]
    assert [o.sizes["batch"] for o in lowered if o.name == "attention"] == [3, 1]
    assert [o.sizes["m"] for o in lowered if o.name == "lm_head"] == [4]


def test_only_serving_is_padded() -> None:
    found = rows(layer_ops("llama3_8b", Step.decode(17, 1000, Mode.EAGER)))
    assert set(found.values()) == {17}


def test_attention_splits_up_to_the_last_captured_size() -> None:
    assert VLLM.serving is not None
    assert VLLM.serving.capture_sizes[-1] == SPLIT_TOKENS == 512


# ---------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("asked", "limits_of", "batch_tokens", "memory_share"),
    [
        ("0.24.0", "0.24.0", 8192, 0.92),
        ("0.26.0", "0.24.0", 8192, 0.92),
        ("0.28.0", "0.28.0", 16384, 0.92),
        ("0.28.1", "0.28.0", 16384, 0.92),
        ("0.15.0", "0.14.1", 8192, 0.9),
        ("0.9.0", "0.14.1", 8192, 0.9),  # older than the oldest known: compared as numbers
    ],
)
def test_a_version_has_the_limits_of_the_newest_known_one_that_is_not_newer(
    asked: str, limits_of: str, batch_tokens: int, memory_share: float
) -> None:
    engine = load_engine(f"vllm@{asked}")
    assert (engine.name, engine.version, engine.asked_version) == ("vllm", limits_of, asked)
    assert engine.serving is not None and VLLM.serving is not None
    assert engine.serving.batch_tokens == batch_tokens
    assert engine.serving.memory_share == memory_share
    # Nothing else differs: kernels and their fusions are those of the one profile.
    assert engine.kernels == VLLM.kernels
    assert engine.serving.offline_batch_tokens == VLLM.serving.offline_batch_tokens
    assert engine.serving.capture_sizes == VLLM.serving.capture_sizes


def test_without_a_version_the_profiles_own_is_meant() -> None:
    assert (VLLM.version, VLLM.asked_version) == ("0.24.0", None)


def test_a_profile_file_can_be_asked_for_a_version_too(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    shipped = Path(__file__).resolve().parents[2] / "specs" / "engines" / "vllm.yaml"
    path.write_text(shipped.read_text(encoding="utf-8"), encoding="utf-8")
    engine = load_engine(f"{path}@0.28.0")
    assert engine.serving is not None
    assert engine.serving.batch_tokens == 16384


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("vllm@latest", "found version 'latest' of engine vllm; allowed: numbers and dots"),
        ("vllm@0.24.0rc1", "found version '0.24.0rc1'"),
        ("vllm@0..24", "found version '0..24'"),
        ("hf@5.17.0", "engine hf knows no versions; leave @5.17.0 out"),
    ],
)
def test_a_version_that_cannot_be_is_refused(
    name: str, told: str, capsys: pytest.CaptureFixture[str], no_debug: None
) -> None:
    with pytest.raises(SpecError) as error:
        load_engine(name)
    assert told in str(error.value)
    assert main(["predict", "llama3_8b", "--engine", name]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert err.count("\n") == 1


H200 = CATALOGUE.device("h200")
BUNDLES = CATALOGUE.bundles(H200, VLLM)
LLAMA = CATALOGUE.spec("llama3_8b")


def predicted(workload: Workload, engine: Engine = VLLM, **more: object) -> Prediction:
    result = predict(
        LLAMA, engine=engine, device=H200, workload=workload, bundles=BUNDLES, **more
    )  # fmt: skip
    assert isinstance(result, Prediction)
    return result


def test_a_prediction_notes_a_version_that_was_not_measured() -> None:
    def notes(engine: str) -> str:
        result = predicted(Workload(prompt_len=64, gen_len=2), load_engine(engine))
        return " ".join(result.notes)

    told = "limits of 0.28.0, kernels and host times of 0.24.0"
    assert f"vllm 0.28.0: {told}" in notes("vllm@0.28.0")
    assert f"vllm 0.29.5: {told}" in notes("vllm@0.29.5")
    assert "kernels and host times" not in notes("vllm@0.24.0")
    assert "kernels and host times" not in notes("vllm")


# ---------------------------------------------------------------- steps and their host


def law() -> HostLaw:
    bundle = select(BUNDLES, "h200", "vllm")
    assert bundle is not None and bundle.host is not None
    return bundle.host


def wait_s(result: Prediction, phase: str) -> float:
    return sum(
        r.latency_s for r in result.breakdown if r.phase == phase and r.kind is Kind.WAIT
    )  # fmt: skip


@pytest.mark.parametrize("slowness", [1.0, 1.3])
def test_a_step_waits_for_the_serial_part_of_its_host(slowness: float) -> None:
    host = law()
    assert host.anchor.module_us is not None
    here = HostAnchor(launch_us=9.0, module_us=slowness * host.anchor.module_us)
    result = predicted(
        Workload(batch=8, prompt_len=1024, gen_len=100), anchors=Anchors(boards=(), host=here)
    )
    # 8 x 1024 tokens stand alone; eight decode. What forms a step is serial in part, what launches
    # the layers of a step that is not captured is not. Of a following step no slow host adds to it.
    lone, following = host.lone_steps[1], host.steps[1]
    prefill_s = lone.step_s + 8 * lone.sequence_s + 8192 * lone.token_s
    decode_s = following.step_s + 8 * (following.sequence_s + following.token_s)
    for phase, formed_s, launched_s, serial_s in (
        ("prefill", prefill_s, 32 * lone.layer_s, slowness * lone.serial_share * prefill_s),
        ("decode", decode_s, 0.0, following.serial_share * decode_s),
    ):
        assert result.phases[phase].latency_s > slowness * (formed_s + launched_s)
        assert wait_s(result, phase) == pytest.approx(serial_s)


def test_a_prefill_above_the_offline_limit_is_chunked_and_its_steps_follow_each_other() -> None:
    whole = predicted(Workload(batch=4, prompt_len=8192, gen_len=1), phases=(Phase.PREFILL,))
    half = predicted(Workload(batch=2, prompt_len=8192, gen_len=1), phases=(Phase.PREFILL,))
    # Two steps of 16384 tokens each, with what the host does for the next one hidden better.
    one, two = half.phases["prefill"], whole.phases["prefill"]
    kernels_s = one.latency_s - wait_s(half, "prefill")
    following = law().steps[1]
    formed_s = following.step_s + 2 * following.sequence_s + 16384 * following.token_s
    serial_s = following.serial_share * formed_s
    assert wait_s(whole, "prefill") == pytest.approx(2 * serial_s)
    # The pauses differ, and with them the clock under the cap, by very little.
    assert two.latency_s == pytest.approx(2 * (kernels_s + serial_s), rel=0.01)
    counts = {r.op: r.count for r in whole.breakdown}
    assert counts["lm_head"] == 2
    assert counts["gate+up"] == 2 * 32


def test_what_an_engine_of_fewer_sequences_does_not_capture_is_launched_layer_by_layer() -> None:
    work = Workload(batch=1, prompt_len=512, gen_len=1)
    whole, fewer = (
        predicted(work, phases=(Phase.PREFILL,), config=Config(max_sequences=most))
        for most in (None, 128)
    )
    lone = law().lone_steps[1]
    formed_s = lone.step_s + lone.sequence_s + 512 * lone.token_s
    launched_s = formed_s + 32 * lone.layer_s
    # The kernels are the same, and what forms a step; the host takes longer by its layers.
    assert fewer.phases["prefill"].latency_s >= max(
        launched_s, whole.phases["prefill"].latency_s * (1 - 1e-9)
    )
    small = Workload(batch=1, prompt_len=256, gen_len=1)  # twice the sequences: captured
    assert predicted(small, config=Config(max_sequences=128)) == predicted(small)


def test_a_limit_of_sequences_says_what_it_does_not_go_with(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, complaint in (
        (["--batch", "256"], "a batch of 256 is above --max-num-seqs 128; raise it, or lower"),
        (["--engine", "hf"], "engine hf has no limit of sequences; leave --max-num-seqs out"),
    ):
        assert main(["predict", "llama3_8b", "--max-num-seqs", "128", *words]) == 2
        assert complaint in capsys.readouterr().err
    assert main(["predict", "llama3_8b", "--max-num-seqs", "0"]) == 2
    assert "--max-num-seqs: 0 found" in capsys.readouterr().err
