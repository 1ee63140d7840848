"""The torch provider on a real device: every runnable runs, and one trial measures it."""

from __future__ import annotations

from typing import Any

import pytest

from energylens.bench.kernels import BUILDERS, Maker, TorchProvider
from energylens.bench.layer import DecoderLayers, duty_points, transformers_config
from energylens.bench.trial import TrialLimits, measure
from energylens.errors import UnsupportedError
from energylens.graph import make_op
from energylens.meter.nvml import NvmlMeter, match_cuda
from energylens.spec.load import load_spec
from energylens.spec.system import Mode, Step

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
ROWS = {"rows": 6, "width": 64}
HEADS = {"q_heads": 8, "kv_heads": 2, "head_dim": 64}
LLAMA = load_spec("llama3_8b")

RUNNABLES = [
    # kernel, sizes, shapes of the tensors that one call returns
    ("gemm", {"m": 4, "n": 96, "k": 32}, [(4, 96)]),
    ("attention_prefill", {"batch": 2, "new": 16, "context": 16, **HEADS}, [(2, 16, 8, 64)]),
    ("attention_decode", {"batch": 2, "new": 1, "context": 17, **HEADS}, [(2, 1, 8, 64)]),
    (
        "attention_decode_masked",
        {"batch": 2, "new": 1, "context": 17, "q_heads": 8, "kv_heads": 8, "head_dim": 64},
        [(2, 1, 8, 64)],
    ),
    ("hf_rmsnorm", ROWS, [(6, 64)]),
    ("hf_rope", {"batch": 2, "new": 3, **HEADS}, [(2, 8, 3, 64), (2, 2, 3, 64)]),
    ("hf_silu_mul", ROWS, [(6, 64)]),
    ("hf_add", ROWS, [(6, 64)]),
    # Cosine and sine of each new position.
    ("hf_prepare", {"batch": 2, "new": 3, "context": 3, "head_dim": 64}, [(1, 3, 64)] * 2),
    ("embedding", ROWS, [(6, 64)]),
    (
        "hf_kv_concat",
        {"batch": 2, "new": 1, "context": 17, "kv_heads": 2, "head_dim": 64},
        [(2, 2, 17, 64)] * 2,
    ),
    (
        "hf_kv_concat",
        {"batch": 2, "new": 17, "context": 17, "kv_heads": 2, "head_dim": 64},
        [(2, 2, 17, 64)] * 2,
    ),
    ("hf_repeat_kv", {"batch": 2, "context": 17, **HEADS}, [(2, 8, 17, 64)] * 2),
    ("argmax", ROWS, [(6,)]),
]


@pytest.fixture(scope="module")
def torch() -> Any:
    """PyTorch with a device, and transformers beside it."""
    module = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    if not module.cuda.is_available():
        pytest.skip("no CUDA device")
    return module


def outputs(result: Any) -> list[Any]:
    """The tensors of a result, in order, whatever holds them."""
    if isinstance(result, tuple | list):
        return [tensor for part in result for tensor in outputs(part)]
    return [] if result is None else [result]


def call_once(torch: Any, kernel: str, sizes: dict[str, int]) -> list[Any]:
    with torch.inference_mode():
        calls, _ = BUILDERS[kernel](Maker(torch, DEVICE, torch.bfloat16), sizes)
        return outputs(calls[0]())


def test_every_runnable_is_tried_here() -> None:
    assert {row[0] for row in RUNNABLES} == set(BUILDERS)


@pytest.mark.parametrize(("kernel", "sizes", "shapes"), RUNNABLES)
def test_a_runnable_makes_what_its_sizes_say(
    torch: Any, kernel: str, sizes: dict[str, int], shapes: list[tuple[int, ...]]
) -> None:
    made = call_once(torch, kernel, sizes)
    assert [tuple(t.shape) for t in made] == shapes
    assert all(bool(t.isfinite().all()) for t in made)


def test_a_decode_step_prepares_one_position(torch: Any) -> None:
    made = call_once(torch, "hf_prepare", {"batch": 2, "new": 1, "context": 17, "head_dim": 64})
    assert [tuple(t.shape) for t in made[-2:]] == [(1, 1, 64)] * 2


def test_a_norm_leaves_rows_of_unit_mean_square(torch: Any) -> None:
    (y,) = call_once(torch, "hf_rmsnorm", {"rows": 8, "width": 1024})
    squares = y.float().square().mean(dim=-1)
    assert squares.tolist() == pytest.approx([1.0] * 8, rel=0.02)


def test_repeated_heads_are_copies_of_their_group(torch: Any) -> None:
    keys, _ = call_once(torch, "hf_repeat_kv", {"batch": 1, "context": 5, **HEADS})
    for group in (slice(0, 4), slice(4, 8)):
        heads = keys[0, group]
        assert bool((heads == heads[0]).all())
    assert not bool((keys[0, 0] == keys[0, 4]).all())


@pytest.mark.parametrize(("kernel", "sizes", "_shapes"), RUNNABLES)
def test_a_runnable_is_captured_and_replayed(
    torch: Any, kernel: str, sizes: dict[str, int], _shapes: object
) -> None:
    work = TorchProvider(0).work(make_op(kernel, **sizes))
    try:
        work.wait(work.enqueue(3))
        assert work.executions >= 1
        assert work.footprint_bytes > 0
    finally:
        work.close()


def test_what_the_provider_cannot_run_is_said(torch: Any) -> None:
    provider = TorchProvider(0)
    for op, words in (
        (make_op("all_reduce", values=8, workers=2), "no runnable for kernel 'all_reduce'"),
        (make_op("gemm", m=1, n=1, k=1, dtype="int4"), "bf16, fp16, fp32, not int4"),
        (
            make_op("attention_prefill", batch=1, new=2, context=5, **HEADS),
            "a whole prompt or one new token",
        ),
    ):
        with pytest.raises(UnsupportedError, match=words):
            provider.work(op)


def test_one_trial_gives_positive_latency_and_power(torch: Any) -> None:
    provider, meter = TorchProvider(0), NvmlMeter()
    (info,) = match_cuda(meter.devices(), [provider.uuid()])
    op = make_op("gemm", m=16, n=8192, k=8192)
    work = provider.work(op)
    try:
        with meter.recorder([info.uuid]) as recorder:
            limits = TrialLimits(power_limit_w=info.power_limit_w)
            trial = measure(work, recorder, info.uuid, limits=limits)
    finally:
        work.close()
    assert trial.valid, trial.reason
    assert trial.latency_s > op.bytes_read / 20e12  # no memory is as fast
    assert trial.latency_s < 0.1
    assert trial.power_w is not None and trial.power_w > 0
    assert info.power_limit_w is None or trial.power_w < 1.2 * info.power_limit_w


def test_a_mix_executes_all_of_its_ops(torch: Any) -> None:
    work = duty_points(TorchProvider(0))[1].build()
    try:
        work.wait(work.enqueue(1))
        assert work.executions == 1
    finally:
        work.close()


@pytest.mark.parametrize(
    "step",
    [Step.prefill(1, 32, Mode.EAGER), Step.decode(2, 33, Mode.CUDA_GRAPH)],
    ids=["prefill", "decode"],
)
def test_layers_keep_the_shape_of_the_hidden_states(torch: Any, step: Step) -> None:
    with torch.inference_mode():
        layers = DecoderLayers(load_spec("llama3_2_1b"), 1, step, DEVICE)
        first, second = layers.forward(), layers.forward()
    group = step.sequences[0]
    assert tuple(first.shape) == (group.count, group.new, 2048)
    assert bool((first == second).all())  # from the same cache each time


@pytest.mark.parametrize(
    ("name", "family"),
    [("llama3_8b", "llama"), ("qwen2_5_7b", "qwen2"), ("qwen3_32b", "qwen3")],
)
def test_a_model_is_replayed_by_the_modules_of_its_family(
    torch: Any, name: str, family: str
) -> None:
    assert transformers_config(load_spec(name)).model_type == family


def test_a_config_is_one_workers_share(torch: Any) -> None:
    config = transformers_config(LLAMA, tp=2, layers=3)
    assert (config.hidden_size, config.intermediate_size) == (4096, 7168)
    assert (config.num_attention_heads, config.num_key_value_heads) == (16, 4)
    assert (config.head_dim, config.num_hidden_layers) == (128, 3)
    with pytest.raises(UnsupportedError, match="tp=3 does not divide"):
        transformers_config(LLAMA, tp=3)
