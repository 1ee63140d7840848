"""Collectives over several GPUs, and what only several show: TP layers, spins, hooked launches.

Started by torchrun's own rendezvous, one process per GPU, on one node or several::

    torchrun --nproc_per_node 2 -m energylens.bench.collectives --out FOLDER

Worker 0 drives: it measures as on one GPU, and each time it queues work it tells the others over a
CPU group to queue the same, so that every worker launches the same collectives in the same order
whatever its own clock says. Sensors are read by the first worker of each node for all boards of
the node. Only the default communicator exists: with seven alive, the same all-reduce took twice as
long.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from energylens.bench.kernels import GraphWork
from energylens.bench.layer import DecoderLayers, layer_point
from energylens.bench.trial import MixPoint, TrialLimits, Work, measure
from energylens.errors import MeterError
from energylens.graph import Op, make_op
from energylens.lower import valid_tp
from energylens.meter.base import AbstractRecorder, DeviceSeries, Reading
from energylens.spec.machines import load_engine
from energylens.spec.model import Spec
from energylens.spec.system import Mode, Step
from energylens.store import Trial

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ALL_REDUCE_BYTES = tuple(8192 * 2**i for i in range(0, 16))  # 8 KB … 256 MB
OTHER_BYTES = tuple(8192 * 8**i for i in range(0, 6))  # 8 KB … 256 MB
GRAPH_COLLECTIVES = 32
FILLER = (8192, 4096)  # inner and outer size of the GEMM between collectives: 67 MB of weights
JOINT_STEPS = (
    Step.prefill(1, 512, Mode.EAGER),
    Step.prefill(4, 2048, Mode.EAGER),
    Step.decode(1, 1025, Mode.CUDA_GRAPH),
    Step.decode(64, 2049, Mode.CUDA_GRAPH),
)


def all_reduce_ops(kernel: str, workers: int) -> tuple[Op, ...]:
    """An all-reduce on the fine grid of sizes, since every TP layer has two."""
    return tuple(make_op(kernel, values=size // 2, workers=workers) for size in ALL_REDUCE_BYTES)


def collective_ops(workers: int) -> tuple[Op, ...]:
    """Ops of the default plan."""
    others = tuple(
        make_op(kind, values=size // 2, workers=workers)
        for kind in COLLECTIVES
        if kind != "all_reduce"
        for size in OTHER_BYTES
    )
    return (*all_reduce_ops("all_reduce", workers), *others)


class _WindowRecorder(AbstractRecorder):
    """Passes everything on to a running recorder, and remembers the last window that was asked for.

    So the other boards can be read over the very window that a trial chose.
    """

    def __init__(self, inner: AbstractRecorder) -> None:
        super().__init__()
        self._inner = inner
        self.window = (0.0, 0.0)

    def now(self) -> float:
        return self._inner.now()

    def series(
        self, uuid: str, start_s: float = -math.inf, end_s: float = math.inf
    ) -> DeviceSeries:
        return self._inner.series(uuid, start_s, end_s)

    def reading(self, uuid: str, start_s: float, end_s: float, *, min_ticks: int = 4) -> Reading:
        self.window = (start_s, end_s)
        return self._inner.reading(uuid, start_s, end_s, min_ticks=min_ticks)


class Team:
    """All workers; the driver's orders reach the followers over a gloo group."""

    def __init__(self) -> None:
        """Join the process group that torchrun describes in the environment."""
        import torch
        import torch.distributed as dist

        self.local = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(self.local)
        if not dist.is_initialized():  # an engine's own start may have done it
            dist.init_process_group("nccl", device_id=torch.device("cuda", self.local))
        self.dist = dist
        self.worker = dist.get_rank()
        self.workers = dist.get_world_size()
        self._cpu = dist.new_group(backend="gloo")

    def tell(self, order: Any) -> Any:
        """Worker 0's ``order``, on every worker."""
        box = [order]
        self.dist.broadcast_object_list(box, src=0, group=self._cpu)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every worker's value, on every worker."""
        out: list[Any] = [None] * self.workers
        self.dist.all_gather_object(out, value, group=self._cpu)
        return out

    def drive(self, work: Work, measure_it: Callable[[Work], Any]) -> Any:
        """Let worker 0 measure ``work`` while the others replay what it replays.

        Returns:
            What worker 0 measured, there; None on the others.
        """
        result = None
        if self.worker == 0:
            try:
                result = measure_it(_Driven(work, self))
            finally:
                self.tell(None)  # whatever happened here, the others must not wait for more
        else:
            token: object = None
            while (replays := self.tell(None)) is not None:
                token = work.enqueue(replays)
            if token is not None:
                work.wait(token)
        self.dist.barrier(group=self._cpu)
        return result


class _Driven:
    """A work whose every enqueue happens on all workers."""

    def __init__(self, work: Work, team: Team) -> None:
        self._work, self._team = work, team
        self.executions, self.footprint_bytes = work.executions, work.footprint_bytes

    def enqueue(self, replays: int) -> object:
        self._team.tell(replays)
        return self._work.enqueue(replays)

    def wait(self, token: object) -> None:
        self._work.wait(token)

    def close(self) -> None:
        self._work.close()


def collective_work(op: Op, team: Team) -> GraphWork:
    """A captured graph of `GRAPH_COLLECTIVES` collectives of the op's size, a GEMM before each.

    As in a model: back to back, a small collective waits for the handshake of the one before it,
    and took 17 us where the same one between the GEMMs of a layer took about 10. What the GEMM
    takes alone (`filler_work`) is to be subtracted.
    """
    import torch

    dist, values, n = team.dist, int(op.sizes["values"]), team.workers
    device = f"cuda:{team.local}"
    whole = torch.empty(values, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
    part = torch.empty(max(1, values // n), dtype=torch.bfloat16, device=device).normal_(0, 0.02)
    whole = whole[: part.numel() * n] if op.kernel != "all_reduce" else whole
    other = torch.empty_like(whole)
    calls: Mapping[str, Callable[[], object]] = {
        # A sum would overflow over the replays; its mean runs the same kernel.
        "all_reduce": lambda: dist.all_reduce(whole, op=dist.ReduceOp.AVG),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, op=dist.ReduceOp.AVG),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
    }
    return interleaved(team, calls[op.kernel])


def filler_work(team: Team) -> GraphWork:
    """The GEMMs of `collective_work` alone."""
    return interleaved(team, lambda: None)


def interleaved(team: Team, collective: Callable[[], object]) -> GraphWork:
    """A captured graph of `GRAPH_COLLECTIVES` calls of ``collective``, a GEMM before each."""
    import torch

    k, n = FILLER
    device = f"cuda:{team.local}"
    x = torch.empty(1, k, dtype=torch.bfloat16, device=device).normal_()
    weights = [
        torch.empty(n, k, dtype=torch.bfloat16, device=device).normal_(0, 0.02) for _ in range(4)
    ]

    def call(weight: Any) -> None:
        torch.nn.functional.linear(x, weight)
        collective()

    calls = [partial(call, w) for w in weights]
    return GraphWork(calls, repeats=GRAPH_COLLECTIVES // len(calls), device=team.local)


def measure_everywhere(
    team: Team,
    work: Work,
    recorder: AbstractRecorder | None,
    uuids: Sequence[str],
    limits: TrialLimits,
) -> tuple[Trial, list[Reading]] | None:
    """Latency on worker 0, and the readings of all of its node's boards over the same window."""

    def measure_it(driven: Work) -> tuple[Trial, list[Reading]]:
        if recorder is None:
            raise MeterError("worker 0 has no recorder")
        window = _WindowRecorder(recorder)
        trial = measure(driven, window, uuids[0], limits=limits)
        start, end = window.window
        return trial, [recorder.reading(u, start, end) for u in uuids]

    result: tuple[Trial, list[Reading]] | None = team.drive(work, measure_it)
    return result


def joint_points(spec: Spec, team: Team) -> tuple[MixPoint, ...]:
    """Layers of a tensor-parallel model on all workers, their all-reduces in place.

    They show what one worker cannot: links that stay awake, contention, and stragglers at the
    power cap. None where the model does not allow so many workers.
    """
    engine = load_engine("hf")
    if team.workers not in valid_tp(spec):
        return ()

    def reduce(_module: Any, _inputs: Any, output: Any) -> None:
        team.dist.all_reduce(output)

    def point(step: Step) -> MixPoint:
        def build() -> GraphWork:
            import torch

            with torch.inference_mode():
                layers = DecoderLayers(spec, team.workers, step, f"cuda:{team.local}")
            for layer in layers.modules:
                layer.self_attn.o_proj.register_forward_hook(reduce)
                layer.mlp.down_proj.register_forward_hook(reduce)
            work = GraphWork([layers.forward], device=team.local)
            work.executions = layers.count
            return work

        return layer_point(spec, engine, team.workers, step, build, collectives=True)

    return tuple(point(step) for step in JOINT_STEPS)


def spin_work(team: Team, seconds: float) -> float | None:
    """Let every worker but the last spin in an all-reduce that it joins ``seconds`` later.

    Returns:
        Time at which the spin began, on the local monotonic clock, or None on the late worker.
    """
    import torch

    x = torch.ones(1024, dtype=torch.bfloat16, device=f"cuda:{team.local}")
    team.dist.all_reduce(x)
    torch.cuda.synchronize()
    team.dist.barrier(group=team._cpu)
    start = time.monotonic()
    late = team.worker == team.workers - 1
    if late:
        time.sleep(seconds)
    team.dist.all_reduce(x)
    torch.cuda.synchronize()
    return None if late else start


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of one worker; worker 0 writes the samples."""
    from energylens.bench.team import BLOCKS, collectives_worker

    parser = argparse.ArgumentParser(prog="energylens.bench.collectives")
    parser.add_argument("--out", type=Path, required=True, help="folder of the samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--spec",
        action="append",
        default=[],
        help="models whose TP layers and host time are measured",
    )
    parser.add_argument(
        "--minutes", type=float, default=4.0, help="stop starting points after this long"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="measure again what the folder already holds"
    )
    parser.add_argument("--nccl-algo", default="", help="NCCL_ALGO of the run, e.g. Ring or Tree")
    parser.add_argument("--block", action="append", help="what to measure; everything by default")
    parser.add_argument("--provider", default="torch", help="whose collectives: torch or vllm")
    options = parser.parse_args(argv)
    if options.nccl_algo:
        os.environ["NCCL_ALGO"] = options.nccl_algo  # read when the communicator is made
    if options.provider == "vllm":
        from energylens.bench.vllm_kernels import join_workers

        join_workers()
    team = Team()
    collectives_worker(
        team,
        out=options.out,
        seed=options.seed,
        specs=options.spec,
        minutes=options.minutes,
        provider=options.provider,
        blocks=options.block or BLOCKS,
        resume=not options.fresh,
        node=socket.gethostname(),
    )
    # Not after an error: the others still wait for this worker, until torchrun ends them all.
    team.dist.destroy_process_group()


if __name__ == "__main__":
    main()
