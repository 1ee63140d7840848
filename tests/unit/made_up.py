"""A made-up calibration: two boards whose ops, mixes and hosts follow known laws.

The simulation is written out on its own: only the nominal prior and the definition of the shares
are the product's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from energylens.cost.features import prior, shares
from energylens.graph import Op, make_op
from energylens.results import Anchors, BoardAnchor, HostAnchor
from energylens.spec.machines import load_device
from energylens.store import Provenance, Sample, Store, Trial

H200 = load_device("h200")
MAX_MHZ = 1980.0

ETA, STRETCH, GAP_S, LINK_W, CAP_W = 1.2, 0.06, 0.5e-6, 20.0, 0.985 * 700.0
LAUNCH_S, WAIT_W, SPIN_W = {1: 12e-6, 2: 25e-6}, {1: 9.0, 2: 31.0}, 14.0

FACTORS = {  # of the prior: time, power
    "gemm": (1.10, 0.90),
    "attention_decode": (1.20, 1.10),
    "hf_add": (0.95, 1.00),
    "all_reduce": (1.30, 0.80),
    "limited_all_reduce": (1.20, 0.90),
    "vllm_attention_decode": (1.15, 1.05),
    "vllm_attention_prefill": (1.25, 0.95),
}


def anchor(uuid: str, *, idle: float, stream: float, gemm_w: float, mhz: float, gemv: float):
    return BoardAnchor(
        board_uuid=uuid, device="h200", idle_w=idle, stream_w=stream, gemm_tflops=660.0,
        gemm_w=gemm_w, gemm_mhz=mhz, gemv_gbs=gemv,
    )  # fmt: skip


A = anchor("a", idle=126.0, stream=640.0, gemm_w=690.0, mhz=1440.0, gemv=4300.0)
B = anchor("b", idle=118.0, stream=600.0, gemm_w=688.0, mhz=1480.0, gemv=4200.0)
BOARDS = {"a": A, "b": B}


def mean(name: str) -> float:
    return math.sqrt(getattr(A, name) * getattr(B, name))


def board(uuid: str) -> tuple[float, float, float, float]:
    """Idle watts; memory power, compute power and memory time over those of the typical board."""

    def uncapped(gemm_w: float, idle_w: float, mhz: float) -> float:
        return (gemm_w - idle_w) * (MAX_MHZ / mhz) ** (1 + ETA)

    own = BOARDS[uuid]
    return (
        own.idle_w,
        (own.stream_w - own.idle_w) / (mean("stream_w") - mean("idle_w")),
        uncapped(own.gemm_w, own.idle_w, own.gemm_mhz)
        / uncapped(mean("gemm_w"), mean("idle_w"), mean("gemm_mhz")),
        mean("gemv_gbs") / own.gemv_gbs,
    )


def typical(op: Op) -> tuple[float, float]:
    """Seconds and above-idle watts of an op on the typical board at the maximum clock."""
    nominal = prior(op, H200)
    time, power = FACTORS[op.kernel]
    wave = 1 + 0.05 * math.sin(math.log2(op.shape[0]) / 3)
    return nominal.latency_s * time * wave, nominal.energy_j / nominal.latency_s * power


def simulate(
    ops: Iterable[Op],
    uuids: str,
    *,
    stretch: float = 0.0,
    gap_s: float = 0.0,
    link_w: float = 0.0,
    pause_s: float = 0.0,
) -> tuple[float, float, float]:
    """Seconds, gross watts per board and clock over the maximum of ops on boards under the cap.

    A pause after the ops counts in the watts, not in the seconds.
    """
    idle, memory, compute, slow = np.mean([board(u) for u in uuids], axis=0)
    scaling = fixed = energy = 0.0
    for op in ops:
        t, w = typical(op)
        s = shares(op, prior(op, H200), t, 1.0)
        t *= op.count * (1 + s.read * (slow - 1)) * (1 + stretch * s.compute)
        scaling += t * s.compute
        fixed += t * (1 - s.compute) + gap_s * op.count * op.launches
        energy += t * w * (1 + s.compute * (compute - 1) + s.dram * (memory - 1))

    def power(f: float) -> float:
        return idle + link_w + energy * f**ETA / (scaling / f + fixed + pause_s)

    low, high = 0.25, 1.0
    if power(1.0) <= CAP_W:
        low = 1.0
    else:
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if power(middle) < CAP_W else (low, middle)
    return scaling / low + fixed, power(low), low


def trial(latency_s: float, power_w: float | None, clock: float = 1.0, **fields: object) -> Trial:
    known: dict[str, object] = {
        "latency_s": latency_s,
        "latency_rel_se": 0.002,
        "power_w": power_w,
        "power_rel_se": None if power_w is None else 0.003,
        "clock_hz": clock * MAX_MHZ * 1e6,
        "clock_min_hz": clock * MAX_MHZ * 1e6,
        "temperature_c": 50.0,
        "ticks": 8,
        "window_s": 0.8,
    }
    return Trial(**(known | fields))


def sample(
    block: str, ops: Sequence[Op], uuids: str, result: Trial | None, label: str = "x", **more: str
) -> Sample:
    known = {"run_id": "r", "time": "2025-01-01T00:00:00Z"}
    return Sample(
        block=block, label=label, ops=tuple(ops), trial=result, board_uuid=";".join(uuids),
        **(known | more),
    )  # fmt: skip


def alone(op: Op, uuids: str, **fields: object) -> Sample:
    return sample("op", [op], uuids, trial(*simulate([op], uuids), **fields), op.kernel)


def provenance(run_id: str = "r", *, boards=(A, B), module_us=2000.0, **fields: object):
    known: dict[str, object] = {
        "time": "2025-01-01T00:00:00Z",
        "device": "h200",
        "provider": "torch",
        "power_limit_w": 700.0,
        "versions": {"torch": "2.11"},
        "anchors": Anchors(
            boards=tuple(boards), host=HostAnchor(launch_us=5.0, module_us=module_us)
        ),
    }
    return Provenance(run_id=run_id, **(known | fields))


def gemm(m: int, n: int, k: int, count: int = 1) -> Op:
    return make_op("gemm", m=m, n=n, k=k, count=count)


GEMMS = [
    gemm(m, n, k)
    for m in (1, 16, 256, 2048, 8192)
    for n, k in ((4096, 4096), (14336, 4096), (4096, 14336))
]
ATTENTION = [
    make_op(
        "attention_decode", batch=b, new=1, context=c, q_heads=32, kv_heads=8, head_dim=128
    )
    for b in (1, 8, 32)
    for c in (512, 2048, 8192)
]  # fmt: skip
ADDS = [make_op("hf_add", rows=r, width=4096) for r in (1, 64, 1024, 8192)]
REDUCES = [make_op("all_reduce", values=2.0**e, workers=2) for e in (12, 15, 18, 21, 24)]


def mixes() -> Iterable[Sample]:
    for m in (16, 256, 2048, 8192):
        duty = [gemm(m, 14336, 4096), make_op("hf_add", rows=8192, width=4096, count=20)]
        layer = [gemm(m, 14336, 4096), gemm(m, 4096, 4096, 4), ADDS[1].times(20)]
        split = [*layer, make_op("all_reduce", values=m * 4096, workers=2, count=2)]
        for uuids, label, ops, laws in (
            ("a", f"duty {m}", duty, {}),
            ("b", f"toy layer {m}", layer, {"stretch": STRETCH}),
            ("ab", f"toy layer {m} tp2", split, {"stretch": STRETCH, "link_w": LINK_W}),
        ):
            result = trial(*simulate(ops, uuids, gap_s=GAP_S, **laws))
            yield sample("mix", ops, uuids, result, label, mode="cuda_graph")


def hosts(run_id: str, slowness: float) -> Iterable[Sample]:
    for workers, uuids in ((1, "a"), (2, "ab")):
        idle = float(np.mean([BOARDS[u].idle_w for u in uuids]))
        for layers in (2, 8):
            ops = [make_op("hf_add", rows=1, width=64, count=layers, launches=3)]
            if workers > 1:
                ops.append(make_op("all_reduce", values=64, workers=workers, count=layers))
            launches = layers * (3 + (workers > 1))
            result = trial(launches * LAUNCH_S[workers] * slowness, idle + WAIT_W[workers])
            yield sample(
                "host", ops, uuids, result, f"host {layers}", mode="eager", run_id=run_id
            )  # fmt: skip


def calibration() -> Iterable[Sample]:
    yield from (alone(op, u) for u in "ab" for op in [*GEMMS, *ATTENTION, *ADDS])
    yield from (alone(op, "ab") for op in REDUCES)
    yield from mixes()
    # Two hosts, one a third slower than the median of both, one as much faster.
    yield from hosts("r", 2 / 3)
    yield from hosts("slow", 4 / 3)
    spin = float(np.mean([A.idle_w, B.idle_w])) + SPIN_W
    yield sample("idle", [], "ab", trial(1.0, spin), "spin")


def write(folder: Path, samples: Iterable[Sample], *runs: Provenance) -> Path:
    with Store(folder) as store:
        for run in runs or (provenance(),):
            store.begin(run)
        for s in samples:
            store.append(s)
    return folder
