"""``energylens explore``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from energylens.cli.options import (
    AnchorFiles,
    Bundles,
    Engine,
    Json,
    Stored,
    check_least,
    check_positive,
    find_engine,
    milliseconds,
    parse_integers,
    parse_overlap,
    parse_precision,
    split_list,
)
from energylens.cli.output import EXIT_INFEASIBLE, check_output, fail, show
from energylens.errors import SpecError


def explore(
    spec: Annotated[
        str,
        typer.Argument(metavar="SPEC", help="Model by name (`energylens list specs`) or file."),
    ],
    gpus: Annotated[
        str,
        typer.Option(
            help="GPUs to use, which replicas fill; of several devices one number, or one for each."
        ),
    ],
    prompt_len: Annotated[int, typer.Option(help="Prompt tokens of each sequence.")] = 1024,
    gen_len: Annotated[
        int, typer.Option(help="Generated tokens, the one that prefill makes included.")
    ] = 128,
    batch: Annotated[
        str | None,
        typer.Option(
            help="Sequences of a replica, 1..256 (every one), 1,16,64, or both [1..256]; with "
            "--rate the most that run at a time [the engine's own]."
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests/s: simulate a service with every layout and number of replicas instead "
            "of batches."
        ),
    ] = None,
    tp: Annotated[
        str | None, typer.Option(help="Tensor parallel degrees, e.g. 1,2,4 [all that divide].")
    ] = None,
    ep: Annotated[
        str | None, typer.Option(help="Expert parallel degrees [1 and all workers].")
    ] = None,
    dp: Annotated[
        str | None, typer.Option(help="Attention data parallel degrees [all, with experts].")
    ] = None,
    pp: Annotated[
        str | None, typer.Option(help="Pipeline parallel degrees [all that the GPUs allow].")
    ] = None,
    overlap: Annotated[
        str | None,
        typer.Option(
            help="All-reduces beside GEMMs, several ways to try joined by commas: "
            "off,8x2,16x4 (SMs x chunks) [the spec's]."
        ),
    ] = None,
    disaggregate: Annotated[
        bool,
        typer.Option("--disaggregate", help="Try prefill and decode on GPUs of their own, too."),
    ] = False,
    device: Annotated[
        str,
        typer.Option(
            help="Device by name (`energylens list devices`) or YAML file; several, joined by "
            "commas, to choose from."
        ),
    ] = "h200",
    engine: Engine = "vllm",
    power_limit: Annotated[float | None, typer.Option(help="Power limit of each GPU in W.")] = None,
    routing: Annotated[
        str | None, typer.Option(help="How tokens choose experts, as for predict [the spec's].")
    ] = None,
    max_ttft_ms: Annotated[float | None, typer.Option(help="Longest prefill in ms.")] = None,
    max_tpot_ms: Annotated[float | None, typer.Option(help="Longest time per token in ms.")] = None,
    max_w: Annotated[
        float | None, typer.Option(help="Most power of all GPUs together in W.")
    ] = None,
    min_throughput: Annotated[
        float | None, typer.Option(help="Fewest generated tokens/s of all replicas together.")
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            help="One or several, the first one ranks: energy_per_token, energy_per_request, "
            "energy_per_prompt, ttft, tpot, throughput, throughput_per_gpu, gpus, and with prices "
            "cost_per_token, cost_per_request, carbon_per_token, carbon_per_request "
            "[energy_per_token,tpot]."
        ),
    ] = None,
    price_per_gpu_hour: Annotated[float | None, typer.Option(help="Price of a GPU-hour.")] = None,
    price_per_kwh: Annotated[
        float | None, typer.Option(help="Price of a kWh, in the same currency.")
    ] = None,
    pue: Annotated[
        float | None, typer.Option(help="Energy of the data centre over that of its GPUs [1].")
    ] = None,
    carbon_g_per_kwh: Annotated[
        float | None, typer.Option(help="Grams of CO2-equivalent of a kWh.")
    ] = None,
    top: Annotated[
        int, typer.Option(help="Most configurations to predict exactly, and to show.")
    ] = 20,
    precision: Stored = None,
    anchor: AnchorFiles = None,
    bundle: Bundles = None,
    csv: Annotated[Path | None, typer.Option(help="File for all configurations.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Image (.png, .svg, .pdf) of the front.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Self-contained page (.html) with the front, interactive.")
    ] = None,
    as_json: Json = False,
) -> None:
    """The Pareto front of all parallel layouts and batches: joules against milliseconds."""
    from energylens import api
    from energylens.anchors import load_anchors, merge_anchors
    from energylens.explore import DEFAULT_OBJECTIVES, Constraints, Prices
    from energylens.explore.several import pairs
    from energylens.files import write_atomically
    from energylens.predict import Catalogue
    from energylens.report.frontier import (
        figure,
        frontier_csv,
        frontier_document,
        frontier_infeasible_document,
        frontier_plot,
        frontier_table,
    )
    from energylens.report.page import frontier_page
    from energylens.results import Infeasible

    check_output("--csv", csv)
    check_output("--plot", plot, (".png", ".svg", ".pdf"))
    check_output("--html", html, (".html", ".htm"))
    if html is not None and rate is not None:
        raise SpecError("--html is about batches, and --rate about traffic; use --csv or --plot")
    if plot is not None:
        if check_least("--gen-len", gen_len) < 2:
            raise SpecError("--plot is about time per token; give --gen-len of 2 or more")
        figure()
    catalogue, devices = Catalogue(bundle_files=tuple(bundle or ())), split_list(device)
    profile = find_engine(catalogue, engine, f"energylens explore {spec} --gpus {gpus}")
    objectives = DEFAULT_OBJECTIVES if objective is None else split_list(objective)
    limits = Constraints(
        max_ttft_s=milliseconds("--max-ttft-ms", max_ttft_ms),
        max_tpot_s=milliseconds("--max-tpot-ms", max_tpot_ms),
        max_power_w=check_positive("--max-w", max_w),
        min_throughput_tokens_s=check_positive("--min-throughput", min_throughput),
    )
    prices = Prices(
        per_gpu_hour=check_positive("--price-per-gpu-hour", price_per_gpu_hour),
        per_kwh=check_positive("--price-per-kwh", price_per_kwh),
        pue=pue,
        carbon_g_per_kwh=check_positive("--carbon-g-per-kwh", carbon_g_per_kwh),
    )
    anchored = [(path, load_anchors(path)) for path in anchor or ()]
    result = api.explore(
        spec,
        gpus=parse_integers("--gpus", gpus),
        device=devices,
        engine=profile,
        prompt_len=check_least("--prompt-len", prompt_len),
        gen_len=check_least("--gen-len", gen_len),
        batch=parse_integers("--batch", batch) if batch else None,
        rate_per_s=check_positive("--rate", rate),
        tp=parse_integers("--tp", tp) if tp else None,
        ep=parse_integers("--ep", ep) if ep else None,
        dp=parse_integers("--dp", dp) if dp else None,
        pp=parse_integers("--pp", pp) if pp else None,
        overlap=[parse_overlap(text) for text in split_list(overlap)] or (None,),
        max_ttft_s=limits.max_ttft_s,
        max_tpot_s=limits.max_tpot_s,
        max_power_w=limits.max_power_w,
        min_throughput_tokens_s=limits.min_throughput_tokens_s,
        objectives=objectives,
        price_per_gpu_hour=prices.per_gpu_hour,
        price_per_kwh=prices.per_kwh,
        pue=prices.pue,
        carbon_g_per_kwh=prices.carbon_g_per_kwh,
        top=check_least("--top", top),
        contexts=_contexts(prompt_len + gen_len) if html else (),
        disaggregate=disaggregate,
        precision=parse_precision(precision),
        power_limit_w=check_positive("--power-limit", power_limit),
        routing=routing,
        anchors=merge_anchors(found for _, found in anchored) if anchored else None,
        catalogue=catalogue,
    )
    if isinstance(result, Infeasible):
        if as_json:
            counts = parse_integers("--gpus", gpus)
            boards = [catalogue.device(name) for name in devices]
            show(
                frontier_infeasible_document(
                    result,
                    spec=catalogue.spec(spec).name,
                    engine=profile.name,
                    pools=[(board.name, count) for board, count in pairs(boards, counts)],
                    prompt_len=prompt_len,
                    gen_len=gen_len,
                    objectives=objectives,
                    constraints=limits.given(),
                    prices=prices.given(),
                    rate_per_s=rate,
                )
            )
        raise typer.Exit(fail("infeasible", result.reason, EXIT_INFEASIBLE))
    given = [("--engine", engine)]
    watts = f"{power_limit:g}" if power_limit else None
    others = (("--routing", routing), ("--power-limit", watts), ("--precision", precision))
    given += [(n, str(v)) for n, v in others if v]
    given += [("--bundle", str(path)) for path in bundle or ()]

    def command(name: str) -> str:
        asked = next(d for d in devices if catalogue.device(d).name == name)
        own = [
            ("--anchor", str(path))
            for path, found in anchored
            if all(board.device == name for board in found.boards)
        ]
        words = [w for pair in (("--device", asked), *given, *own) for w in pair]
        return shlex.join(["energylens", "predict", spec, *words])

    if csv is not None:
        write_atomically(csv, frontier_csv(result))
    if plot is not None:
        frontier_plot(result, plot)
    if html is not None:
        write_atomically(html, frontier_page(result, command))
    show(frontier_document(result, command) if as_json else frontier_table(result, command))


def _contexts(longest: int) -> list[int]:
    """Contexts around that of a request, from an eighth of it to eight times it."""
    return sorted({max(2, round(longest * 2.0**power)) for power in range(-3, 4)})
