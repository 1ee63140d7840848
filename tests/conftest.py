"""What several tests build on: small results made by hand, and the folder of shared truth files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from energylens.anchors import save_anchors
from energylens.results import (
    Anchors,
    BoardAnchor,
    BreakdownRow,
    BundleRef,
    Interval,
    Kind,
    Measurement,
    Memory,
    PhaseResult,
    Prediction,
    Source,
)
from energylens.spec.system import Parallelism, Workload

ROOT = Path(__file__).resolve().parents[1]
TOY_WORKLOAD = Workload(batch=4, prompt_len=512, gen_len=11)
TWO_GPUS = Parallelism(tp=2)

settings.register_profile("ci", deadline=None, derandomize=True)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture
def shared_truth() -> Path:
    """Folder of the measured truth files beside the checkout."""
    folder = ROOT.parent / "shared" / "truth"
    if not folder.is_dir():
        pytest.skip("no ../shared/truth beside this checkout")
    return folder


@pytest.fixture
def anchor_file(tmp_path: Path) -> Path:
    """A file with the anchor of one H200, ``GPU-1``."""
    board = BoardAnchor(
        board_uuid="GPU-1",
        device="h200",
        idle_w=125.0,
        stream_w=640.0,
        gemm_w=690.0,
        gemm_tflops=655.0,
    )
    path = tmp_path / "anchor.json"
    save_anchors(Anchors(boards=(board,)), path)
    return path


@pytest.fixture
def make_phase() -> Callable[..., PhaseResult]:
    def make(
        latency_s: float = 0.02,
        energy_j: float = 10.0,
        *,
        gpus: int = 1,
        spread: float = 0.1,
        clock_hz: float | None = 1.98e9,
    ) -> PhaseResult:
        return PhaseResult(
            latency_s=latency_s,
            energy_j=energy_j,
            mean_power_w=energy_j / latency_s / gpus,
            clock_hz=clock_hz,
            interval=Interval(
                level=0.9,
                latency_s=(latency_s * (1 - spread), latency_s * (1 + spread)),
                energy_j=(energy_j * (1 - spread), energy_j * (1 + spread)),
            ),
            source=Source.INTERPOLATED,
            regime="device",
        )

    return make


@pytest.fixture
def make_prediction(make_phase: Callable[..., PhaseResult]) -> Callable[..., Prediction]:
    def make(
        phases: dict[str, PhaseResult] | None = None,
        *,
        workload: Workload = TOY_WORKLOAD,
        parallelism: Parallelism = TWO_GPUS,
    ) -> Prediction:
        gpus = parallelism.gpus
        if phases is None:
            phases = {
                "prefill": make_phase(0.05, 40.0, gpus=gpus),
                "decode": make_phase(0.01, 6.0, gpus=gpus),
                "request": make_phase(0.15, 100.0, gpus=gpus),
            }
        rows = tuple(
            BreakdownRow(
                phase=name,
                kind=Kind.GEMM,
                op="gate_up",
                count=32,
                latency_s=result.latency_s,
                energy_j=result.energy_j,
                share=1.0,
                source=Source.INTERPOLATED,
                limit_share=0.75,
            )
            for name, result in phases.items()
        )
        return Prediction(
            spec="toy",
            device="h200",
            engine="hf",
            parallelism=parallelism,
            workload=workload,
            memory=Memory(
                weights_bytes=70e9,
                kv_cache_bytes=2e9,
                activations_bytes=1e9,
                reserve_bytes=1e9,
                capacity_bytes=141e9,
            ),
            phases=phases,
            breakdown=rows,
            source=Source.INTERPOLATED,
            bundles=(BundleRef(device="h200", provider="torch", version="1", sha256="ab" * 32),),
            anchors=None,
        )

    return make


@pytest.fixture
def make_measurement() -> Callable[..., Measurement]:
    def make(record_id: str = "row", **fields: object) -> Measurement:
        known: dict[str, object] = {
            "device": "h200",
            "engine": "hf",
            "spec": "toy",
            "phase": "decode",
            "mode": "eager",
            "batch": 4,
            "prompt_len": 512,
            "latency_s": 0.01,
            "energy_j": 5.0,
        }
        return Measurement(record_id=record_id, **(known | fields))

    return make


@pytest.fixture
def no_debug(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Errors as users see them, whatever the developer's environment asks for."""
    monkeypatch.delenv("ENERGYLENS_DEBUG", raising=False)
    yield


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as in a wide terminal, whatever the test runner's is."""
    monkeypatch.setenv("COLUMNS", "160")
