"""Thousands of predictions from one grid, on all cores or many machines, and nothing done twice.

A grid is a YAML file of axes; a cell is one of each. Every finished cell is a line of the file of
results, written at once: a run that is killed has lost only what was under way, and the next one
begins there. A cell is known by its content (its model, device, engine and calibrations included),
so an edited grid or a new calibration computes only what is new.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from energylens import __version__, api
from energylens.errors import EnergyLensError, SpecError
from energylens.explore.front import exact_values
from energylens.files import write_atomically
from energylens.predict import Catalogue
from energylens.results import Infeasible
from energylens.results.service import Percentiles, ServingResult
from energylens.serving import Traffic, read_lengths, serve
from energylens.serving.traffic import ARRIVALS
from energylens.spec.fields import Field, parse_yaml
from energylens.spec.system import Config, Overlapping, Parallelism

GRID_SCHEMA, CELL_SCHEMA = "energylens/grid/v1", "energylens/cell/v1"
BACKENDS = ("loky", "threading", "dask", "ray")
_AXES = ("specs", "devices", "engines", "layouts", "workloads", "rates", "arrivals", "seeds")
_DEGREES = ("tp", "ep", "pp", "dp", "replicas")
_LOST_WORKERS = 5  # in a row without a finished cell: then it is the cells that kill them


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One prediction: of a batch, or of a service where there are ``arrivals``."""

    spec: str
    device: str
    engine: str
    parallelism: Parallelism
    batch: int
    prompt_len: int
    gen_len: int
    lengths: str | None = None
    arrivals: str | None = None
    rate_per_s: float | None = None
    duration_s: float | None = None
    seed: int = 0

    @property
    def fields(self) -> dict[str, Any]:
        """What tells the cell from others, flat."""
        own = asdict(self)
        overlap = self.parallelism.overlap
        layout = {**self.parallelism.degrees, "overlap": None if overlap is None else str(overlap)}
        return {**{k: v for k, v in own.items() if k != "parallelism"}, **layout}


# ---------------------------------------------------------------- the grid


def read_grid(path: Path) -> tuple[Cell, ...]:
    """All cells of a grid.

    Raises:
        SpecError: the file cannot be read, or an axis holds what cannot be.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror})") from None
    grid = parse_yaml(text, str(path)).mapping(("schema", "specs"), (*_AXES[1:], "duration_s"))
    grid["schema"].choice((GRID_SCHEMA,))
    traffic = [name for name in ("rates", "arrivals", "seeds", "duration_s") if name in grid]
    if traffic and not {"rates", "arrivals"} & set(traffic):
        raise grid[traffic[0]].error("is about traffic; give rates or arrivals, too")
    arrivals = _traffic(grid) if traffic else [{}]
    cells = [
        Cell(
            spec=spec.text(),
            device=device,
            engine=engine,
            parallelism=layout,
            **workload,
            **rates,
        )
        for spec, device, engine, layout, workload, rates in product(
            grid["specs"].items(1),
            grid["devices"].texts() if "devices" in grid else ("h200",),
            grid["engines"].texts() if "engines" in grid else ("vllm",),
            [_layout(f) for f in grid["layouts"].items(1)] if "layouts" in grid else [_LAYOUT],
            _workloads(grid, traffic=bool(traffic)),
            arrivals,
        )
    ]
    return tuple(dict.fromkeys(cells))


_LAYOUT = Parallelism()


def _layout(field: Field) -> Parallelism:
    fields = dict(field.mapping((), (*_DEGREES, "overlap")))
    overlap = fields.pop("overlap").text() if "overlap" in fields else None
    degrees: dict[str, Any] = {name: f.integer() for name, f in fields.items()}
    try:
        own = None if overlap is None else Overlapping.parse(overlap)
        return Parallelism(**degrees, overlap=own)
    except EnergyLensError as error:
        raise field.error(str(error)) from None


def _workloads(grid: Mapping[str, Field], *, traffic: bool) -> list[dict[str, Any]]:
    found = []
    for field in grid["workloads"].items(1) if "workloads" in grid else ():
        own = field.mapping((), ("batch", "prompt_len", "gen_len", "lengths"))
        if "batch" in own and traffic:
            raise own["batch"].error("under traffic the engine forms the batches; leave it out")
        if "lengths" in own and not traffic:
            raise own["lengths"].error("is about traffic; give rates or arrivals, too")
        lengths = own.pop("lengths", None)
        workload: dict[str, Any] = {name: f.integer() for name, f in own.items()}
        found.append(workload | ({"lengths": lengths.text()} if lengths else {}))
    return [{"batch": 1, "prompt_len": 1024, "gen_len": 128} | own for own in found or [{}]]


def _traffic(grid: Mapping[str, Field]) -> list[dict[str, Any]]:
    """Arrivals of each cell; a file sets its own rate, and has no seed."""
    rates = [f.number() for f in grid["rates"].items(1)] if "rates" in grid else []
    seeds = [f.integer() for f in grid["seeds"].items(1)] if "seeds" in grid else [0]
    duration = {"duration_s": grid["duration_s"].number()} if "duration_s" in grid else {}
    found: list[dict[str, Any]] = []
    for arrivals in grid["arrivals"].items(1) if "arrivals" in grid else [None]:
        name = arrivals.text() if arrivals else ARRIVALS[0]
        if name not in ARRIVALS:
            found.append({"arrivals": name, **duration})
        elif rates:
            found += [
                {"arrivals": name, "rate_per_s": rate, "seed": seed, **duration}
                for rate, seed in product(rates, seeds)
            ]
        elif arrivals:
            raise arrivals.error(f"{name} arrivals need rates")
    return found


# ---------------------------------------------------------------- one cell


@lru_cache(maxsize=1)
def _catalogue() -> Catalogue:
    """What is known by name, read once by each process."""
    return Catalogue()


def key(cell: Cell) -> str:
    """Names a cell by all that its result depends on.

    Raises:
        SpecError: a name is unknown, or a file cannot be read.
    """
    s = api.setting(cell.spec, device=cell.device, engine=cell.engine, catalogue=_catalogue())
    files = [name for name in (cell.lengths, cell.arrivals) if name and name not in ARRIVALS]
    parts = (
        __version__,
        sorted(cell.fields.items()),
        replace(s.spec, path=""),
        s.device,
        s.engine,
        [bundle.sha256 for bundle in s.bundles],
        [hashlib.sha256(_content(name)).hexdigest() for name in files],
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def _content(name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise SpecError(f"{name}: cannot be read ({error.strerror})") from None


def run_cell(name: str, cell: Cell) -> tuple[str, dict[str, Any]]:
    """The name of a cell, and its result as a flat row; a worker runs this."""
    try:
        return name, _predicted(cell) if cell.arrivals is None else _served(cell)
    except EnergyLensError as error:
        return name, Infeasible(reason=str(error)).rows()[0]


def _predicted(cell: Cell) -> dict[str, Any]:
    p = api.predict(
        cell.spec,
        device=cell.device,
        engine=cell.engine,
        **cell.parallelism.degrees,
        overlap=cell.parallelism.overlap,
        batch=cell.batch,
        prompt_len=cell.prompt_len,
        gen_len=cell.gen_len,
        catalogue=_catalogue(),
    )
    if isinstance(p, Infeasible):
        return p.rows()[0]
    row: dict[str, Any] = {"feasible": True, "reason": None, "source": str(p.source)}
    for name, (value, low, high) in exact_values(p).items():
        row |= {name: value, f"{name}_low": low, f"{name}_high": high}
    return row


def _served(cell: Cell) -> dict[str, Any]:
    s = api.setting(cell.spec, device=cell.device, engine=cell.engine, catalogue=_catalogue())
    lengths = read_lengths(Path(cell.lengths)) if cell.lengths else None
    result = serve(
        s.spec,
        traffic=Traffic(
            arrivals=str(cell.arrivals),
            rate_per_s=cell.rate_per_s,
            lengths=lengths or ((cell.prompt_len, cell.gen_len),),
            duration_s=cell.duration_s,
            seed=cell.seed,
        ),
        engine=s.engine,
        device=s.device,
        config=Config(parallelism=cell.parallelism),
        bundles=s.bundles,
        link=s.link(cell.parallelism.replica_gpus),
    )
    return result.rows()[0] if isinstance(result, Infeasible) else _service(result)


def _service(r: ServingResult) -> dict[str, Any]:
    row: dict[str, Any] = {"feasible": True, "reason": None, "source": str(r.source)}
    for name in (
        "energy_per_request_j", "energy_per_token_j", "mean_power_w", "total_power_w",
        "ttft_s", "tpot_s", "e2e_s", "requests_per_s", "tokens_per_s",
        "saturation_rate_per_s", "saturated", "utilisation", "preemptions",
    ):  # fmt: skip
        value = getattr(r, name)
        if isinstance(value, Percentiles):
            row |= {f"{name}_{part}": v for part, v in asdict(value).items()}
        else:
            row[name] = value
    low, high = r.interval.energy_per_request_j
    return row | {"energy_per_request_j_low": low, "energy_per_request_j_high": high}


# ---------------------------------------------------------------- all cells


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What a run did: all cells, those that were finished before, and those that cannot run."""

    out: Path
    cells: int
    reused: int
    infeasible: int


def sweep(
    cells: Sequence[Cell],
    out: Path,
    *,
    backend: str = "loky",
    jobs: int = -1,
    scheduler: str | None = None,
    watch: Callable[[Iterable[None], int], Iterable[None]] = lambda done, total: done,
) -> Sweep:
    """Predict all cells that ``out`` does not hold yet, and append each as it is finished.

    Args:
        cells: of `read_grid`.
        out: file of results, a JSON document a line.
        backend: of `BACKENDS`; who runs the cells.
        jobs: processes or threads, all cores by default; a running cluster has its own workers.
        scheduler: address of a Dask scheduler or a Ray cluster, whose workers have EnergyLens and
            all files of the grid; without one a local cluster is started.
        watch: is given one item for each cell as it is finished, and their number; for progress.

    Raises:
        SpecError: a name in the grid is unknown, or an argument is wrong.
        ModuleNotFoundError: joblib, or Dask or Ray where it is asked for, is not installed.
    """
    if backend not in BACKENDS:
        raise SpecError(f"--backend: unknown value {backend!r}; allowed: {', '.join(BACKENDS)}")
    if scheduler and backend not in ("dask", "ray"):
        raise SpecError(
            f"--scheduler is about --backend dask or ray, not {backend}; give both or none"
        )
    if jobs == 0:
        raise SpecError("--jobs: 0 found, and must be a number above 0, or -1 for all cores")
    named = {key(cell): cell for cell in cells}
    finished = {line["key"] for line in _lines(out)} & set(named)
    left = {name: cell for name, cell in named.items() if name not in finished}

    def append() -> Iterator[None]:
        with _appending(out) as write:
            for name, row in _results(left, backend, jobs, scheduler):
                write(name, named[name], row)
                yield

    for _ in watch(append(), len(left)) if left else ():
        pass
    done = [line for line in _lines(out) if line["key"] in named]
    return Sweep(
        out=out,
        cells=len(named),
        reused=len(finished),
        infeasible=sum(not line["result"]["feasible"] for line in done),
    )


def _results(
    cells: Mapping[str, Cell], backend: str, jobs: int, scheduler: str | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Results as they come; where a process dies, the cells that it had are given out again.

    Dask and Ray do so by themselves.
    """
    if backend == "ray":
        yield from _ray_results(cells, jobs, scheduler)
        return
    from joblib import Parallel, delayed, parallel_config

    left, lost = dict(cells), 0
    with ExitStack() as stack:
        if backend == "dask":
            from distributed import Client

            workers = {} if scheduler or jobs < 0 else {"n_workers": jobs, "threads_per_worker": 1}
            stack.enter_context(Client(scheduler, set_as_default=True, **workers))
        stack.enter_context(parallel_config(backend, n_jobs=-1 if scheduler else jobs))
        while left:
            run = Parallel(return_as="generator_unordered", batch_size=1)
            try:
                for name, row in run(delayed(run_cell)(n, cell) for n, cell in [*left.items()]):
                    del left[name]
                    lost = 0
                    yield name, row
            except BrokenProcessPool:
                lost += 1
                if lost > _LOST_WORKERS:
                    raise


def _ray_results(
    cells: Mapping[str, Cell], jobs: int, scheduler: str | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Results as they come, of Ray's own tasks: its joblib backend returns no generator."""
    import ray

    local: dict[str, Any] = {"num_cpus": jobs if jobs > 0 else None, "include_dashboard": False}
    with (
        redirect_stdout(sys.stderr),  # Ray tells there of workers that died; stdout is for results
        ray.init(
            scheduler or "local",
            logging_level=logging.ERROR,
            log_to_driver=False,
            **({} if scheduler else local),
        ),
    ):
        task = ray.remote(run_cell)
        futures = [task.remote(name, cell).future() for name, cell in cells.items()]
        yield from (future.result() for future in as_completed(futures))


@contextmanager
def _appending(path: Path) -> Iterator[Callable[[str, Cell, Mapping[str, Any]], None]]:
    """Writes cells as whole lines: each is on the disk when the call returns, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)

    def write(name: str, cell: Cell, row: Mapping[str, Any]) -> None:
        line = {"schema": CELL_SCHEMA, "key": name, "cell": cell.fields, "result": dict(row)}
        os.write(file, json.dumps(line, allow_nan=False).encode() + b"\n")
        os.fsync(file)

    try:
        os.ftruncate(file, path.read_bytes().rfind(b"\n") + 1)  # a line that a killed run began
        yield write
    finally:
        os.close(file)


def _lines(path: Path) -> list[dict[str, Any]]:
    """Finished cells of a file of results; none where there is no file."""
    if not path.exists():
        return []
    lines = []
    for i, text in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1]):
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            line = None
        if not isinstance(line, dict) or line.get("schema") != CELL_SCHEMA:
            raise SpecError(
                f"{path}:{i + 1}: is no line of a sweep ({CELL_SCHEMA}); choose another file"
            )
        lines.append(line)
    return lines


def rows(out: Path) -> list[dict[str, Any]]:
    """The cells of a file of results with their numbers, flat and alike, for `pandas.DataFrame`."""
    found = [{**line["cell"], **line["result"]} for line in _lines(out)]
    names = dict.fromkeys(name for row in found for name in row)
    return [{name: row.get(name) for name in names} for row in found]


def write_csv(out: Path, path: Path) -> None:
    """The same as a CSV file."""
    found, text = rows(out), io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(found[0]) if found else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    write_atomically(path, text.getvalue())
