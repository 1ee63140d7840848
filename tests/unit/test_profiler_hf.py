"""Runs of a small random model on the CPU: sizes, steps, workers, the profiled pass."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import Capture, run_json

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

from energylens.cli import main  # noqa: E402
from energylens.errors import SpecError, UnsupportedError  # noqa: E402
from energylens.measured import profile_to_json  # noqa: E402
from energylens.profiler.hf import HfEngine, tensor_bytes  # noqa: E402
from energylens.profiler.loader import Place, load  # noqa: E402
from energylens.profiler.options import ProfileRequest  # noqa: E402
from energylens.profiler.session import Session, Solo  # noqa: E402
from energylens.profiler.steps import Limits  # noqa: E402
from energylens.report.profile import profile_table  # noqa: E402
from energylens.spec.system import Parallelism  # noqa: E402

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
PARAMETERS = 2 * 300 * 64 + 64 + 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64)
"""Embedding and head, last norm, and per layer q, o, k, v, the MLP and two norms."""
QUICK = Limits(repeats=3, settle_s=0.0, window_s=0.02, tail_s=0.0, lone=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return path


def asked(folder: Path, **fields: Any) -> ProfileRequest:
    known = {"batch": 2, "prompt_len": 8, "gen_len": 4, "random_weights": True, "repeats": 3}
    return ProfileRequest(model=str(folder), **known | fields)


def engine_of(request: ProfileRequest) -> HfEngine:
    place = Place(device="cpu")
    return HfEngine(request, load(request, place), place)


def measured(request: ProfileRequest, **fields: Any) -> dict[str, Any]:
    session = Session(
        request=request, engine=engine_of(request), team=Solo(), limits=QUICK, **fields
    )
    return profile_to_json(session.measure())


def test_a_config_alone_is_enough(folder: Path) -> None:
    document = measured(asked(folder))
    assert document["model_size_gb"] * 1e9 == pytest.approx(4 * PARAMETERS, rel=1e-3)
    # 3 layers, keys and values, 2 heads of 16, 2 sequences of 8 tokens, fp32.
    assert document["memory"]["kv_cache_bytes"] == 3 * 2 * 2 * 16 * 2 * 8 * 4
    assert document["precision"] == "fp32"
    assert document["decode"]["context_len"] == 9
    assert document["energy_reason"] == "no meter was asked for"
    for phase in ("prefill", "decode", "request"):
        assert document[phase]["n"] + document[phase]["n_outliers"] >= 3
        assert document[phase]["energy_j"] is None
    assert document["ttft_s"] > 0
    assert document["tpot_s"] == pytest.approx((document["ttlt_s"] - document["ttft_s"]) / 3)


def test_a_decode_step_leaves_the_cache_as_it_was(folder: Path) -> None:
    engine = engine_of(asked(folder))
    seen: list[int] = []
    forward = engine.forward

    def watched(ids: Any, cache: Any) -> Any:
        out = forward(ids, cache)
        if ids.shape[1] == 1:
            seen.append(int(out[1].get_seq_length()))
        return out

    engine.forward = watched  # type: ignore[method-assign]
    with engine.stepper("decode") as stepper:
        for _ in range(5):
            stepper.step()
    assert seen == [9] * 5


def test_captured_decode_without_a_gpu_is_eager_and_says_so(folder: Path) -> None:
    document = measured(asked(folder, cache_graph=True, phases=("decode",)))
    assert document["modes"]["decode"] == "eager"
    assert document["environment"]["notes"] == [
        "--cache_graph: there is no CUDA device, decode is eager"
    ]


def test_weights_and_prompts_follow_from_the_seed(folder: Path) -> None:
    one, same, other = (engine_of(asked(folder, seed=s)) for s in (1, 1, 2))
    assert torch.equal(one._ids, same._ids)
    assert not torch.equal(one._ids, other._ids)
    first = [next(iter(e.model.parameters())) for e in (one, same, other)]
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])
    assert float(first[0].detach().std()) == pytest.approx(0.02, rel=0.05)


def test_special_tokens_are_in_no_prompt(folder: Path) -> None:
    config = CONFIG | {"vocab_size": 8, "bos_token_id": 1, "eos_token_id": [2, 3]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    ids = engine_of(asked(folder, prompt_len=64))._ids
    assert set(ids.flatten().tolist()) == {0, 4, 5, 6, 7}


def test_a_checkpoint_is_loaded_with_its_weights(folder: Path) -> None:
    made = engine_of(asked(folder)).model
    made.save_pretrained(folder)
    found = engine_of(asked(folder, random_weights=False))
    assert found.loaded.weights == "checkpoint"
    for a, b in zip(made.parameters(), found.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_dtype_and_attention_are_the_ones_asked_for(folder: Path) -> None:
    engine = engine_of(asked(folder, dtype="bf16", attention="eager"))
    assert {p.dtype for p in engine.model.parameters()} == {torch.bfloat16}
    assert engine.facts()["attention"] == "eager"
    assert engine.precision() == "bf16"


@pytest.mark.parametrize(
    ("degrees", "told"),
    [
        (Parallelism(tp=3), "--tp 3: does not divide the model's 2 KV heads; allowed: 1, 2"),
        (Parallelism(tp=2, ep=2), "--ep 2: the model has no experts; allowed: 1"),
    ],
)
def test_b105_degrees_are_checked_before_loading(
    folder: Path, degrees: Parallelism, told: str
) -> None:
    with pytest.raises(UnsupportedError, match=told.replace("(", r"\(")):
        load(asked(folder, parallelism=degrees), Place(device="cpu"))


def test_quantised_checkpoints_need_their_weights(folder: Path) -> None:
    quantised = {"quant_method": "awq", "bits": 4, "group_size": 128}
    config = CONFIG | {"quantization_config": quantised}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UnsupportedError, match=r"is quantised .int4.; its checkpoint is needed"):
        load(asked(folder), Place(device="cpu"))


def test_a_broken_config_is_one_line(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "no_such_type"}', encoding="utf-8")
    with pytest.raises(SpecError, match="no_such_type") as caught:
        load(asked(folder), Place(device="cpu"))
    assert "\n" not in str(caught.value)


def test_memory_shared_by_tensors_counts_once() -> None:
    whole = torch.zeros(10, 4)
    assert tensor_bytes([whole, whole.view(40), {"again": whole}]) == 160


def test_the_profiled_pass_writes_a_trace_a_phase(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "traces"
    document = measured(
        asked(
            folder,
            phases=("prefill", "decode"),
            size=False,
            torch_profile=True,
            kernel_profile=True,
            trace_dir=str(out),
        )
    )
    assert sorted(p.name for p in out.iterdir()) == [
        "decode-worker0.json.gz",
        "kernels-worker0.csv",
        "prefill-worker0.json.gz",
    ]
    assert document["breakdown"] is None
    assert document["environment"]["notes"] == [
        "the profiled pass saw no kernels of a GPU: no breakdown"
    ]
    header = (out / "kernels-worker0.csv").read_text(encoding="utf-8")
    assert header == "phase,kind,op,count,latency_s,share\n"


def test_the_command_line_measures_sizes_of_a_spec_and_says_why_there_is_no_energy(
    capsys: Capture, folder: Path
) -> None:
    document = run_json(capsys, "profile", str(folder), "--random-weights", "--size")
    assert document["decode"] is None
    assert document["model_size_gb"] * 1e9 == pytest.approx(4 * PARAMETERS, rel=1e-3)
    words = ["--random-weights", "--ttft", "--energy", "--prompt-len", "8", "--repeats", "3"]
    if not torch.cuda.is_available():
        assert main(["profile", str(folder), *words]) == 4
        assert "no energy: the model runs on the CPU" in capsys.readouterr().out


def test_two_workers_share_one_model(folder: Path, tmp_path: Path) -> None:
    """Tensor parallel over gloo: half of the heads each, the same document as one worker's."""
    if torch.cuda.is_available():
        pytest.skip("for machines without a GPU")
    out = tmp_path / "run.json"
    words = ["--random-weights", "--tp", "2", "--ttft", "--size", "--prompt-len", "8"]
    done = subprocess.run(
        [sys.executable, "-m", "energylens", "profile", str(folder), *words, "-o", str(out)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text(encoding="utf-8"))
    assert document["n_gpus"] == 2
    assert len(document["environment"]["worker_latency_s"]["prefill"]) == 2
    # Keys and values of one of the two heads: 3 layers, 2 x 16 values, 1 sequence of 8, fp32.
    assert document["memory"]["kv_cache_bytes"] == 3 * 2 * 16 * 8 * 4
    assert document["memory"]["weights_bytes"] < 4 * PARAMETERS


def test_documents_of_the_cpu_can_be_shown(folder: Path) -> None:
    assert profile_table(measured(asked(folder, phases=("prefill",))))
