"""Fitting a provider that stands on another one's kernels, and the host time of a real engine.

The engine's steps are simulated from known host times; the fit must find them again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_up import (
    ATTENTION,
    BOARDS,
    GAP_S,
    GEMMS,
    H200,
    REDUCES,
    STRETCH,
    alone,
    calibration,
    gemm,
    provenance,
    sample,
    simulate,
    trial,
    write,
)

from energylens.cost.bundle import Bundle, StepHost
from energylens.cost.features import StepShape
from energylens.errors import CalibrationError
from energylens.fit import fit_bundle
from energylens.fit.host import pool_expert_layers, standard_errors
from energylens.graph import KERNELS, Op, make_op
from energylens.spec.machines import load_engine
from energylens.store import Sample

for _module in ("sklearn", "scipy", "pandas", "threadpoolctl"):
    pytest.importorskip(_module)

WAIT_W = 17.0
# What a token and a launched layer take is the same whether steps follow each other or not.
LONE = StepHost(
    step_s=4.5e-3, sequence_s=200e-6, token_s=0.5e-6, layer_s=30e-6, expert_layer_s=0.0,
    serial_share=0.55,
)  # fmt: skip
FOLLOWING = replace(LONE, step_s=1.6e-3, sequence_s=20e-6, serial_share=0.15)
SMALL, WHOLE = (2, 8), 16  # layers
# Phase, batch, new tokens of each sequence, context.
SMALL_STEPS = (
    ("decode", 1, 1, 64),
    ("decode", 32, 1, 64),
    ("decode", 256, 1, 64),
    ("prefill", 1, 64, 64),
    ("prefill", 16, 32, 32),
    ("prefill", 1, 1024, 1024),
    ("prefill", 32, 64, 64),
    ("prefill", 1, 4096, 4096),
)
WHOLE_STEPS = (
    ("decode", 1, 1, 1024),
    ("decode", 16, 1, 1024),
    ("decode", 64, 1, 2048),
    ("decode", 128, 1, 512),
    ("prefill", 1, 128, 128),
    ("prefill", 1, 512, 512),
    ("prefill", 1, 2048, 2048),
    ("prefill", 8, 1024, 1024),
)


def attention(phase: str, batch: int, new: int, context: int, heads: int, layers: int) -> Op:
    return make_op(
        f"vllm_attention_{phase}", count=layers, batch=batch, new=new, context=context,
        q_heads=4 * heads, kv_heads=heads, head_dim=128,
    )  # fmt: skip


def step_ops(step: tuple[str, int, int, int], layers: int, *, small: bool) -> tuple[Op, ...]:
    phase, batch, new, context = step
    heads, width = (1, 512) if small else (8, 4096)
    return (
        gemm(batch * new, width, width, layers),
        attention(phase, batch, new, context, heads, layers),
    )


def host_s(step: tuple[str, int, int, int], layers: int) -> tuple[float, float]:
    """Host time of a step, and the part of it that is serial, on the median host."""
    phase, batch, new, _ = step
    law, tokens = LONE if phase == "prefill" else FOLLOWING, batch * new
    formed = law.step_s + law.sequence_s * batch + law.token_s * tokens
    launched = law.layer_s * layers if tokens > 512 else 0.0  # ahead of the device
    return formed + launched, law.serial_share * formed


def engine_steps(run_id: str, slowness: float) -> Iterable[Sample]:
    """What an engine on a host ``slowness`` times as slow as the median one would have taken."""
    idle_w = BOARDS["a"].idle_w
    cases = [(s, n, f"{n} layers", True) for s in SMALL_STEPS for n in SMALL]
    cases += [(s, WHOLE, "whole", False) for s in WHOLE_STEPS]
    for step, layers, what, small in cases:
        ops = step_ops(step, layers, small=small)
        host, serial = (slowness * seconds for seconds in host_s(step, layers))
        laws = {"stretch": STRETCH, "gap_s": GAP_S, "pause_s": serial}
        device_s, power_w, _ = simulate(ops, "a", **laws)
        took = trial(max(device_s + serial, host), idle_w + WAIT_W if small else power_w)
        phase, batch, _, context = step
        label = f"toy {phase} {batch}x{context} {what} tp1"
        yield sample("host", ops, "a", took, label, mode="serving", run_id=run_id)


def kernels_of_the_engine() -> list[Op]:
    cases = [(s, True) for s in SMALL_STEPS] + [(s, False) for s in WHOLE_STEPS]
    ops = [op.times(1) for s, small in cases for op in step_ops(s, 1, small=small)]
    return list({op.key: op for op in ops}.values())


def fit(*folders: Path, provider: str = "vllm") -> Bundle:
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):
        return fit_bundle(folders, device=H200, provider=provider, version="1")[0]


def of_run(run_id: str, samples: Iterable[Sample]) -> Iterable[Sample]:
    for s in samples:
        yield sample(s.block, s.ops, s.board_uuid.split(";"), s.trial, s.label, run_id=run_id)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Runs of torch, of vllm on two hosts, and of a provider that vllm does not stand on."""
    root = tmp_path_factory.mktemp("samples")
    torch = write(
        root / "torch", calibration(), provenance(module_us=2000.0), provenance("slow")
    )  # fmt: skip
    ours = [*of_run("v", (alone(op, "a") for op in kernels_of_the_engine()))]
    ours += [*engine_steps("v", 1.0), *engine_steps("w", 1.5)]
    vllm = write(
        root / "vllm",
        ours,
        *(
            provenance(name, module_us=us, provider="vllm", versions={"vllm": "0.24.0"})
            for name, us in (("v", 2000.0), ("w", 3000.0))
        ),
    )
    other = write(
        root / "other",
        of_run("o", (alone(op, "a") for op in GEMMS)),
        provenance("o", provider="sglang", versions={"sglang": "0.5"}, boards=[]),
    )
    return torch, vllm, other


@pytest.fixture(scope="module")
def fitted(folders: tuple[Path, ...]) -> Bundle:
    return fit(*folders)


def test_host_times_of_steps_that_stand_alone_are_found_again(fitted: Bundle) -> None:
    assert fitted.host is not None
    found = fitted.host.lone_steps[1]
    assert found.step_s == pytest.approx(LONE.step_s, rel=0.01)
    assert found.sequence_s == pytest.approx(LONE.sequence_s, rel=0.01)
    assert found.token_s == pytest.approx(LONE.token_s, rel=0.02)
    assert found.layer_s == pytest.approx(LONE.layer_s, rel=0.05)
    assert found.serial_share == pytest.approx(LONE.serial_share, rel=0.05)


def test_standard_errors_are_those_of_a_straight_line() -> None:
    x, sigma = np.array([2.0, 3.0, 8.0, 11.0]), 0.5
    jacobian = np.column_stack((np.ones(4), x, np.zeros(4))) / sigma
    of_slope = sigma / math.sqrt(float(((x - x.mean()) ** 2).sum()))
    of_start = of_slope * math.sqrt(float((x**2).mean()))
    assert standard_errors(jacobian) == pytest.approx([of_start, of_slope, 0.0])


def test_times_of_layers_are_as_uncertain_as_small_models_leave_them(fitted: Bundle) -> None:
    assert fitted.host is not None
    found = fitted.host.lone_steps[1]
    assert 0.0 < found.layer_sd_s < 2 * LONE.layer_s
    launched = StepShape(sequences=1, tokens=1024, layers=32)
    assert found.layers_rel_se(launched) == pytest.approx(
        found.layer_sd_s * 32 / found.total_s(launched)
    )
    assert found.layers_rel_se(replace(launched, tokens=512)) == 0.0
    # No model had experts, so what their layers take is a guess.
    assert found.expert_layer_sd_s == found.expert_layer_s > 0.0


def test_a_layer_of_experts_takes_the_same_on_any_number_of_workers() -> None:
    one, two = (
        replace(LONE, expert_layer_s=t, expert_layer_sd_s=sd)
        for t, sd in ((6e-4, 1e-4), (0.0, 3e-4))
    )
    pooled = pool_expert_layers({1: one, 2: two, 4: replace(two, expert_layer_sd_s=math.inf)})
    # Weights 1 and 1/9, independently of the code.
    assert [s.expert_layer_s for s in pooled.values()] == pytest.approx(3 * [5.4e-4])
    assert [s.expert_layer_sd_s for s in pooled.values()] == pytest.approx(3 * [3e-4 / 10**0.5])
    assert {replace(s, expert_layer_s=0, expert_layer_sd_s=0) for s in pooled.values()} == {
        replace(LONE, expert_layer_s=0, expert_layer_sd_s=0)
    }


def test_host_times_of_steps_that_follow_each_other_are_found_again(fitted: Bundle) -> None:
    assert fitted.host is not None
    found = fitted.host.steps[1]
    assert found.step_s == pytest.approx(FOLLOWING.step_s, rel=0.01)
    assert found.sequence_s == pytest.approx(FOLLOWING.sequence_s, rel=0.02)
    # They decode, which tells no token from its sequence, and launches no layer on its own.
    assert found.token_s == pytest.approx(FOLLOWING.token_s, rel=0.02)
    assert found.layer_s == pytest.approx(FOLLOWING.layer_s, rel=0.05)
    assert found.serial_share == pytest.approx(FOLLOWING.serial_share, rel=0.05)


def test_the_host_law_is_of_the_median_host_and_of_the_engine_alone(fitted: Bundle) -> None:
    host = fitted.host
    assert host is not None
    # Module times 2000, 2000, 2000 and 3000 us. The eager steps of torch's runs are not in it.
    assert host.anchor.module_us == pytest.approx(2000.0)
    assert dict(host.launch_s) == {}
    # The small models show what a waiting board draws; a whole model's watts are its kernels'.
    assert dict(host.wait_w) == pytest.approx({1: WAIT_W})
    assert set(host.steps) == set(host.lone_steps) == {1}


def test_a_run_of_another_provider_is_left_out(fitted: Bundle) -> None:
    assert fitted.facts["runs"] == ["r", "slow", "v", "w"]
    assert fitted.versions == {"torch": "2.11", "vllm": "0.24.0"}
    own = [op for op in kernels_of_the_engine() if op.kernel == "gemm"]
    assert fitted.facts["points"]["gemm"] == 2 * len(GEMMS) + len(own)


def test_a_bundle_holds_the_kernels_of_its_engine_and_collectives_only(fitted: Bundle) -> None:
    named = {k.kernel for k in load_engine("vllm").kernels.values()}
    collectives = {name for name, k in KERNELS.items() if k.is_collective}
    assert set(fitted.kernels) <= named | collectives
    assert set(fitted.kernels) == {
        "gemm", "vllm_attention_prefill", "vllm_attention_decode", "all_reduce",
    }  # fmt: skip
    assert {op.key for op in REDUCES} == fitted.kernels["all_reduce"].measured
    # The others were fitted as well, since the mixes that shape the laws are made of them.
    assert fitted.facts["points"]["attention_decode"] == 2 * len(ATTENTION)


def test_torch_stands_on_its_own_runs(folders: tuple[Path, ...]) -> None:
    bundle = fit(*folders, provider="torch")
    assert bundle.facts["runs"] == ["r", "slow"]
    assert not [name for name in bundle.kernels if name.startswith("vllm_")]
    assert bundle.host is not None
    assert dict(bundle.host.steps) == {}


def test_vllm_cannot_be_fitted_on_torchs_runs_alone(folders: tuple[Path, ...]) -> None:
    with pytest.raises(CalibrationError) as error:
        fit(folders[0])
    assert "no run measured vllm's kernels (found: torch)" in str(error.value)
    assert "energylens calibrate --provider vllm" in str(error.value)
