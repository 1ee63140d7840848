"""All-reduces on a few streaming multiprocessors: alone, and beside the GEMM that they sum up.

NCCL runs a collective on as many SMs as its communicator is allowed to use, so each count needs a
communicator of its own; it is taken down before the next one is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from energylens.bench.kernels import GraphWork
from energylens.bench.trial import MixPoint
from energylens.graph import make_op
from energylens.spec.system import Mode

if TYPE_CHECKING:
    from energylens.bench.collectives import Team

SM_COUNTS = (16, 4, 32, 2, 8, 1)
OFTEN = (16, 2)  # beside every GEMM, and in turns with it
ALONE_BYTES = (2**21, 2**23, 2**25, 2**27)  # 2 MB … 128 MB
GEMMS = (
    (4096, 4096, 7168),
    (2048, 8192, 4096),
    (8192, 5120, 12800),
    (16384, 8192, 14336),
    (1024, 8192, 28672),
)
"""Tokens, outer and inner size of down and attention output projections of 8 B to 70 B models."""
CHUNKS = (2, 4, 8)
WEIGHTS = 2  # buffers to rotate over


def overlap_points(team: Team) -> Iterator[MixPoint]:
    """What an overlap is made of, and overlaps; points of one op are that op alone.

    Every worker must build them in this order, or leave out the same ones.
    """
    for sms in SM_COUNTS:
        with _communicator(team, sms) as group:
            for size in ALONE_BYTES:
                yield _all_reduce(team, group, size // 2, sms)
            for gemm in GEMMS if sms in OFTEN else GEMMS[:3]:
                turns = (1,) if sms in OFTEN else ()
                for chunks in (*turns, *CHUNKS):
                    yield _beside(team, group, gemm, sms, chunks)
    for m, n, k in GEMMS:
        for chunks in (1, *CHUNKS):
            yield _alone(team, m // chunks, n, k)


@contextmanager
def _communicator(team: Team, sms: int) -> Iterator[Any]:
    """Of all workers, whose collectives run on exactly ``sms`` SMs."""
    dist = team.dist
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = options.config.max_ctas = sms
    group = dist.new_group(backend="nccl", pg_options=options)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def _alone(team: Team, m: int, n: int, k: int) -> MixPoint:
    op = make_op("gemm", m=m, n=n, k=k)

    def build() -> GraphWork:
        x, weights = _operands(team, m, n, k)
        out = x.new_empty(m, n)
        return _graph(team, [partial(_multiply, x, w, out) for w in weights])

    return MixPoint(label=op.name, ops=(op,), mode=Mode.CUDA_GRAPH, build=build)


def _all_reduce(team: Team, group: Any, values: int, sms: int) -> MixPoint:
    op = make_op("limited_all_reduce", values=values, workers=team.workers, sms=sms)

    def build() -> GraphWork:
        import torch

        x = torch.empty(values, dtype=torch.bfloat16, device=f"cuda:{team.local}").normal_(0, 0.02)
        # A sum would overflow over the replays; its mean runs the same kernel.
        mean = team.dist.ReduceOp.AVG
        return _graph(team, [lambda: team.dist.all_reduce(x, op=mean, group=group)])

    return MixPoint(label=op.name, ops=(op,), mode=Mode.CUDA_GRAPH, build=build)


def _beside(team: Team, group: Any, gemm: tuple[int, int, int], sms: int, chunks: int) -> MixPoint:
    """A GEMM in chunks of its rows, each summed up while the next ones are computed."""
    m, n, k = gemm
    ops = (
        make_op("gemm", m=m // chunks, n=n, k=k, count=chunks),
        make_op(
            "overlapped_all_reduce",
            values=m * n,
            workers=team.workers,
            sms=sms,
            chunks=chunks,
            m=m,
            n=n,
            k=k,
        ),
    )

    def build() -> GraphWork:
        import torch

        x, weights = _operands(team, m, n, k)
        out = x.new_empty(m, n)
        parts = list(zip(x.chunk(chunks), out.chunk(chunks), strict=True))
        beside = torch.cuda.Stream(team.local)

        def run(weight: Any) -> None:
            computing = torch.cuda.current_stream()
            for rows, sums in parts:
                _multiply(rows, weight, sums)
                beside.wait_stream(computing)
                with torch.cuda.stream(beside):
                    team.dist.all_reduce(sums, group=group)
            computing.wait_stream(beside)

        return _graph(team, [partial(run, w) for w in weights])

    label = f"overlap {m}x{n}x{k} on {sms} SMs in {chunks}"
    return MixPoint(label=label, ops=ops, mode=Mode.CUDA_GRAPH, build=build)


def _operands(team: Team, m: int, n: int, k: int) -> tuple[Any, list[Any]]:
    import torch

    def normal(rows: int, sd: float) -> Any:
        shape = (rows, k)
        return torch.empty(shape, dtype=torch.bfloat16, device=f"cuda:{team.local}").normal_(0, sd)

    return normal(m, 1.0), [normal(n, 0.02) for _ in range(WEIGHTS)]


def _multiply(x: Any, weight: Any, out: Any) -> None:
    import torch

    torch.mm(x, weight.t(), out=out)


def _graph(team: Team, calls: Sequence[Callable[[], object]]) -> GraphWork:
    return GraphWork(calls, repeats=2, device=team.local)
