"""The Pareto front of a search: a JSON document, CSV, a table with the commands, a plot."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from energylens.anchors import anchors_to_json
from energylens.report.launch import PredictCommand, command_lines, commands
from energylens.report.prediction import parallelism_document
from energylens.report.table import bundle_names, digits, memory, quantity, table
from energylens.results import LIMIT_OPTIONS, Infeasible, SearchCounts
from energylens.results.search import Frontier, ScoredConfig
from energylens.results.service import ServingResult
from energylens.spec.system import Parallelism

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType
    from rich.table import Table

FRONTIER_SCHEMA = "energylens/frontier/v1"
FRONT_COLUMNS = {
    "energy_per_token_j": ("J/token", "J"),
    "energy_per_request_j": ("J/request", "J"),
    "energy_per_prompt_j": ("J/prompt", "J"),
    "ttft_s": ("TTFT", "s"),
    "tpot_s": ("TPOT", "s"),
    "throughput_per_gpu_tokens_s": ("tokens/s\nper GPU", ""),
    "total_power_w": ("total", "W"),
    "cost_per_million_tokens": ("cost of\nM tokens", "money"),
    "cost_per_request": ("cost of\nrequest", "money"),
    "carbon_per_million_tokens_g": ("CO2e of\nM tokens", "g"),
    "carbon_per_request_g": ("CO2e of\nrequest", "g"),
}
"""Value of a configuration -> its column of the table, and its unit."""


def frontier_document(frontier: Frontier, predict_command: PredictCommand) -> dict[str, Any]:
    """The ``energylens/frontier/v1`` document.

    Args:
        frontier: what was found.
        predict_command: to which a configuration's own options are added.
    """
    f = frontier
    return {
        "schema": FRONTIER_SCHEMA,
        "spec": f.spec,
        "engine": f.engine,
        **_machines([(pool.device, pool.gpus) for pool in f.pools]),
        "prompt_len": f.prompt_len,
        "gen_len": f.gen_len,
        "rate_per_s": f.rate_per_s,
        "feasible": True,
        "reason": None,
        "objectives": list(f.objectives),
        "constraints": dict(f.constraints),
        "prices": dict(f.prices),
        "counts": _counts(f.counts),
        "table_error": f.table_error,
        "level": f.level,
        "picks": [
            {
                "objective": name,
                "id": f.best(name).id,
                "tied": [c.id for c in f.front if name in c.tied_on],
                **commands(f, f.best(name), predict_command),
            }
            for name in f.objectives
        ],
        "configs": [_scored(c) for c in f.configs],
        "source": str(f.source),
        "bundles": [asdict(bundle) for bundle in f.bundles],
        "anchors": anchors_to_json(f.anchors) if f.anchors else None,
        "notes": list(f.notes),
    }


def frontier_infeasible_document(
    infeasible: Infeasible,
    *,
    spec: str,
    engine: str,
    pools: Sequence[tuple[str, int]],
    prompt_len: int,
    gen_len: int,
    objectives: Sequence[str],
    constraints: Mapping[str, float],
    prices: Mapping[str, float],
    rate_per_s: float | None,
) -> dict[str, Any]:
    """The ``energylens/frontier/v1`` document of a search that left nothing."""
    return {
        "schema": FRONTIER_SCHEMA,
        "spec": spec,
        "engine": engine,
        **_machines(pools),
        "prompt_len": prompt_len,
        "gen_len": gen_len,
        "rate_per_s": rate_per_s,
        "feasible": False,
        "reason": infeasible.reason,
        "objectives": list(objectives),
        "constraints": dict(constraints),
        "prices": dict(prices),
        "counts": _counts(infeasible.counts) if infeasible.counts else None,
        "table_error": None,
        "level": None,
        "picks": [],
        "configs": [],
        "source": None,
        "bundles": [],
        "anchors": None,
        "notes": [],
    }


def _counts(counts: SearchCounts) -> dict[str, Any]:
    return {
        "tried": counts.tried,
        "infeasible": counts.infeasible,
        "filtered": counts.filtered,
        "infeasible_by": dict(counts.infeasible_by),
        "filtered_by": dict(counts.filtered_by),
    }


def _machines(pools: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Devices and GPUs that were searched; the first two are null where there are several."""
    device, gpus = pools[0] if len(pools) == 1 else (None, None)
    return {
        "device": device,
        "gpus": gpus,
        "pools": [{"device": name, "gpus": count} for name, count in pools],
    }


def _scored(c: ScoredConfig) -> dict[str, Any]:
    p = c.prediction
    known = p or c.service
    return {
        "id": c.id,
        "device": c.pool.device,
        **parallelism_document(c.parallelism),
        "batch": c.batch,
        "prefill": asdict(c.prefill) | parallelism_document(c.prefill.parallelism)
        if c.prefill
        else None,
        "unused_gpus": c.unused_gpus,
        **{name: value for name, value in c.values.items() if name != "gpus"},
        "intervals": {name: list(ends) for name, ends in c.intervals.items()} or None,
        "memory": memory(p.memory) if p else None,
        "source": str(known.source) if known else None,
        "service": _service(c.service) if c.service else None,
        "exact": c.exact,
        "filtered_by": list(c.filtered_by),
        "on_frontier": c.on_frontier,
        "rank": c.rank,
        "dominated_by": c.dominated_by,
        "best_of": list(c.best_of),
        "tied_on": list(c.tied_on),
    }


def _service(r: ServingResult) -> dict[str, Any]:
    """What a service meets, beyond the values that configurations are compared by."""
    return {
        "ttft_s": asdict(r.ttft_s),
        "tpot_s": asdict(r.tpot_s) if r.tpot_s else None,
        "e2e_s": asdict(r.e2e_s),
        "saturation_rate_per_s": r.saturation_rate_per_s,
        "utilisation": r.utilisation,
        "kv_cache": asdict(r.kv_cache),
        "preemptions": r.preemptions,
    }


def frontier_csv(frontier: Frontier) -> str:
    """A line for each configuration, as `Frontier.rows` has them."""
    rows = frontier.rows()
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def frontier_table(frontier: Frontier, predict_command: PredictCommand) -> RenderableType:
    """The exact part of the front, what it costs to choose otherwise, the counts, the commands.

    Args:
        frontier: what was found.
        predict_command: as for `frontier_document`.
    """
    from rich.console import Group

    f = frontier
    pick = f.best(f.objectives[0])
    shown = command_lines(f, pick, predict_command)
    return Group(
        f"{f.spec} on {pool_names(f)}, engine {f.engine}: prompt {f.prompt_len}, generate "
        f"{f.gen_len}{traffic_words(f)}; objectives {', '.join(f.objectives)}",
        _front_table(f),
        *_front_lines(f),
        *pool_lines(f),
        *trade_lines(f),
        *price_lines(f),
        *count_lines(f),
        *(f"note: {note}" for note in f.notes),
        *(_uncut(f"{name}: {command}") for name, command in shown.items()),
        provenance(f),
    )


def _load(f: Frontier, c: ScoredConfig) -> str:
    """Sequences of a replica, or the most of a service."""
    return f"batch {c.batch}" if f.rate_per_s is None else f"at most {c.batch} sequences"


def traffic_words(f: Frontier) -> str:
    """Under which traffic, if any."""
    return "" if f.rate_per_s is None else f", {f.rate_per_s:g} requests/s"


def provenance(f: Frontier) -> str:
    """Where the numbers come from."""
    devices = ", ".join(dict.fromkeys(pool.device for pool in f.pools))
    return (
        f"device {devices}, engine {f.engine}, bundle {bundle_names(f.bundles)}, weakest source: "
        f"{f.source}"
    )


def pool_names(f: Frontier) -> str:
    """The GPUs that were searched."""
    return " or ".join(f"{pool.gpus} x {pool.device}" for pool in f.pools)


def _front_table(f: Frontier) -> Table:
    shown = [c for c in f.front if c.exact]
    columns = {n: v for n, v in FRONT_COLUMNS.items() if n in shown[0].values} if shown else {}
    rows = []
    overlaps = any(c.parallelism.overlap is not None for c in f.configs)
    for c in shown:
        marks = [*(f"best {n}" for n in c.best_of), *(f"tied {n}" for n in c.tied_on)]
        cells = [_cell(c.values[n], unit) for n, (_, unit) in columns.items()]
        device = [f"{c.pool.gpus} x {c.pool.device}"] if len(f.pools) > 1 else []
        layout = _layout_cells(c.parallelism, c.batch)
        if c.prefill is not None:
            first = _layout_cells(c.prefill.parallelism, c.prefill.batch)
            layout = [f"{n}/{own}" for n, own in zip(first, layout, strict=True)]
        layout = layout if overlaps else layout[:-1]
        rows.append((str(c.rank), *device, *layout, *cells, ", ".join(marks)))
    names = (
        "rank",
        *(["device"] if len(f.pools) > 1 else []),
        "tp",
        "ep",
        "dp",
        "pp",
        "replicas",
        "batch" if f.rate_per_s is None else "most\nsequences",
        *(["overlap"] if overlaps else []),
        *(t for t, _ in columns.values()),
        "",
    )
    return table("front", names, rows, text=(len(names) - 1,))


def _layout_cells(p: Parallelism, batch: int) -> list[str]:
    """Degrees, batch and overlap, ``-`` where it is the spec's own."""
    overlap = "-" if p.overlap is None else p.overlap
    return [str(n) for n in (p.tp, p.ep, p.dp, p.pp, p.replicas, batch, overlap)]


def _cell(value: float, unit: str) -> str:
    """A value of the table; power and money without a prefix."""
    if unit == "money":
        return digits(value)
    return f"{digits(value)} W" if unit == "W" else quantity(value, unit)


def _front_lines(f: Frontier) -> Iterator[str]:
    level = f"{100 * f.level:g} %"
    if any(c.tied_on for c in f.front):
        yield (
            f"best, tied: of those predicted exactly; tied where the {level} intervals of that "
            "objective overlap (they share errors, so an order may be surer than that)"
        )
    hidden = sum(not c.exact for c in f.front)
    if hidden:
        yield (
            f"{hidden} more on the front, known to {100 * f.table_error:g} % from the table: "
            "--json and --csv have them, --top predicts more of them exactly"
        )
    largest = max(c.batch for c in f.configs)
    # Where memory already cut the batches of a layout, larger ones cannot run.
    cut = [reason for reason in f.counts.infeasible_by if "memory: " in reason]

    def open_ended(c: ScoredConfig) -> bool:
        own = f"memory: {c.parallelism.layout} at "
        if len(f.pools) > 1:
            own = f"{c.pool.gpus} x {c.pool.device}: {own}"
        return not any(reason.startswith(own) for reason in cut)

    served = f.rate_per_s is not None  # then it is a limit of the engine
    if not served and any(c.batch == largest and c.best_of and open_ended(c) for c in f.front):
        yield f"the best uses the largest batch that was tried, {largest}: --batch can go further"
    if any(c.unused_gpus for c in f.front):
        yield "some layouts leave GPUs unused: those are not in the energy or the power"


def pool_lines(f: Frontier) -> Iterator[str]:
    """What each kind of GPUs can do at the same constraints, where there are several."""
    for pool in f.pools if len(f.pools) > 1 else ():
        own = [c for c in f.configs if c.pool == pool and c.rank]
        name = f"{pool.gpus} x {pool.device}"
        if not own:
            yield f"{name}: nothing meets the constraints"
            continue
        best = min(own, key=lambda c: c.rank or 0)
        shown = [
            f"{label} {_cell(best.values[n], unit)}"
            for n, (label, unit) in FRONT_COLUMNS.items()
            if n in ("energy_per_token_j", "energy_per_request_j", "ttft_s", "tpot_s")
            and n in best.values
        ]
        yield (
            f"{name}, best {f.objectives[0]}: {layout_name(f, best).partition(': ')[2]}, "
            f"{_load(f, best)}, rank {best.rank}: {', '.join(shown)}"
            + ("" if best.exact else " (from the table)")
        )


def trade_lines(f: Frontier) -> Iterator[str]:
    """What the best by energy costs in latency, and the other way round."""
    thrifty = next((n for n in f.objectives if n.startswith("energy")), None)
    quick = next((n for n in f.objectives if n in ("tpot", "ttft")), None)
    if thrifty is None or quick is None:
        return
    a, b = f.best(thrifty), f.best(quick)
    joules, seconds = f"{thrifty}_j", f"{quick}_s"
    if a is b:
        yield f"{a.id} is the best by energy and by {quick.upper()}"
        return
    yield (
        f"the best {thrifty} ({a.id}: {quantity(a.values[joules], 'J')}) costs "
        f"{a.values[seconds] / b.values[seconds]:.3g} x the least {quick.upper()} "
        f"({quantity(a.values[seconds], 's')} against {quantity(b.values[seconds], 's')}); "
        f"the best {quick} ({b.id}) costs {b.values[joules] / a.values[joules]:.3g} x the least "
        f"energy ({quantity(b.values[joules], 'J')})"
    )


def price_lines(f: Frontier) -> Iterator[str]:
    """What the costs are made of."""
    if f.prices:
        given = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in f.prices.items())
        costs = "cost what decode does, a request costs its prefill too"
        if f.rate_per_s is not None:
            costs = "cost all that the service does"
        yield (
            f"prices: {given}; tokens are generated ones and {costs}; GPUs are paid for while they "
            "serve"
        )


def count_lines(f: Frontier) -> Iterator[str]:
    """How many configurations were tried, and why others fell."""
    c = f.counts
    exact = sum(s.exact for s in f.configs)
    how = "predicted exactly" if f.rate_per_s is None else "simulated"
    yield (
        f"{c.tried} configurations tried, {c.infeasible} cannot run, {c.filtered} miss a "
        f"constraint, {exact} {how}"
    )
    for reason, n in sorted(c.infeasible_by.items(), key=lambda item: -item[1]):
        yield f"  {n} cannot run: {reason}"
    for name, n in c.filtered_by.items():
        option, _, factor = LIMIT_OPTIONS[name]
        yield f"  {n} miss {option} {f.constraints[name] * factor:g}"


def layout_name(f: Frontier, config: ScoredConfig) -> str:
    """``tp2 ep2 x 4``, after who prefills for it, and the GPUs where there are several kinds."""
    name, pool = _degrees(config.parallelism), config.pool
    if config.prefill is not None:
        name = f"prefill {_degrees(config.prefill.parallelism)} / decode {name}"
    return name if len(f.pools) == 1 else f"{pool.gpus} x {pool.device}: {name}"


def _degrees(parallelism: Parallelism) -> str:
    degrees = {n: d for n, d in parallelism.degrees.items() if d > 1 and n != "replicas"}
    name = " ".join(f"{n}{d}" for n, d in degrees.items()) or "tp1"
    name += f" overlap {parallelism.overlap}" if parallelism.overlap is not None else ""
    return f"{name} x {parallelism.replicas}" if parallelism.replicas > 1 else name


def _uncut(text: str) -> Table:
    """A line to copy: never wrapped, however narrow the terminal is."""
    from rich.table import Table

    line = Table.grid()
    line.add_column(min_width=len(text), no_wrap=True)
    line.add_row(text)
    return line


def figure() -> type[Figure]:
    """The door to the plotting library.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    from matplotlib.figure import Figure

    return Figure


def save_figure(canvas: Figure, path: Path) -> None:
    """Write an image at once; the suffix of ``path`` says which format."""
    temporary = path.with_name(f".{path.stem}.tmp{path.suffix}")
    canvas.savefig(temporary, dpi=150)
    temporary.replace(path)


def frontier_plot(frontier: Frontier, path: Path) -> None:
    """Energy per token against time per token of all that meet the constraints, as an image.

    Args:
        frontier: what was found, of requests that generate at least two tokens.
        path: file to write; its suffix says which format.
    """
    f = frontier
    canvas = figure()(figsize=(9, 6), layout="constrained")
    axes = canvas.add_subplot(
        xscale="log", yscale="log", xlabel="time per token (TPOT), ms", ylabel="energy per token, J"
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    layouts: dict[str, list[ScoredConfig]] = {}
    for c in f.configs:
        if not c.filtered_by:
            layouts.setdefault(layout_name(f, c), []).append(c)
    # Layouts without a point on the front stay in the background, under one name.
    on_front = {name: own for name, own in layouts.items() if any(c.on_frontier for c in own)}
    beaten = [c for name, own in layouts.items() if name not in on_front for c in own]
    if beaten:
        axes.scatter(*_plotted(beaten), s=5, color="0.85", label="layouts off the front")
    for i, (label, own) in enumerate(on_front.items()):
        axes.scatter(
            *_plotted(own), s=9, color=f"C{i % 10}", marker="osD^v"[i // 10 % 5], label=label
        )
    front = sorted(f.front, key=lambda c: c.values["tpot_s"])
    if set(f.objectives) == {"energy_per_token", "tpot"}:
        axes.plot(*_plotted(front), color="black", linewidth=0.8, label="front", zorder=1.5)
    else:  # the front of other objectives is no line on these axes
        axes.scatter(*_plotted(front), s=36, facecolors="none", edgecolors="black", label="front")
    middle = math.sqrt(front[0].values["tpot_s"] * front[-1].values["tpot_s"])
    for c in {c.id: c for name in f.objectives for c in (f.best(name),)}.values():
        (x,), (y,) = _plotted([c])
        right = c.values["tpot_s"] > middle
        axes.annotate(
            f"best {', '.join(c.best_of)}\n{_load(f, c)}",
            (x, y),
            xytext=(-12 if right else 12, -28 if right else 12),
            textcoords="offset points",
            horizontalalignment="right" if right else "left",
            arrowprops={"arrowstyle": "-"},
            fontsize="small",
        )
    axes.margins(0.12)
    axes.grid(which="both", linewidth=0.3)
    axes.legend(fontsize="small")
    lengths = f"prompt {f.prompt_len}, generate {f.gen_len}{traffic_words(f)}"
    axes.set_title(f"{f.spec} on {pool_names(f)}, {f.engine}: {lengths}")
    save_figure(canvas, path)


def _plotted(configs: Sequence[ScoredConfig]) -> tuple[list[float], list[float]]:
    """Milliseconds and joules per token."""
    return (
        [1e3 * c.values["tpot_s"] for c in configs],
        [c.values["energy_per_token_j"] for c in configs],
    )
