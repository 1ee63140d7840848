"""``energylens advise``."""

from __future__ import annotations

from typing import Annotated

import typer

from energylens.cli.options import (
    AnchorFiles,
    Bundles,
    Device,
    Engine,
    Json,
    Overlap,
    check_positive,
    find_engine,
    load_anchors,
    parse_modes,
    parse_overlap,
)
from energylens.cli.output import EXIT_INFEASIBLE, fail, show
from energylens.spec.system import Workload


def advise(
    spec: Annotated[
        str,
        typer.Argument(metavar="SPEC", help="Model by name (`energylens list specs`) or file."),
    ],
    batch: Annotated[int, typer.Option(help="Sequences of each replica.")] = 1,
    prompt_len: Annotated[int, typer.Option(help="Prompt tokens of each sequence.")] = 1024,
    gen_len: Annotated[
        int, typer.Option(help="Generated tokens, the one that prefill makes included.")
    ] = 128,
    device: Device = "h200",
    engine: Engine = "vllm",
    mode: Annotated[
        list[str] | None, typer.Option(help="Launch mode, as for predict [the engine's].")
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor parallel degree.")] = None,
    ep: Annotated[int, typer.Option(help="Expert parallel degree; adds no GPUs.")] = 1,
    pp: Annotated[int | None, typer.Option(help="Pipeline parallel degree.")] = None,
    dp: Annotated[int | None, typer.Option(help="Attention data parallel degree.")] = None,
    replicas: Annotated[int | None, typer.Option(help="Independent copies.")] = None,
    overlap: Overlap = None,
    gpus: Annotated[
        int | None, typer.Option(help="replicas x dp x tp x pp; given alone, it sets --tp.")
    ] = None,
    power_limit: Annotated[float | None, typer.Option(help="Power limit of each GPU in W.")] = None,
    routing: Annotated[
        str | None, typer.Option(help="How tokens choose experts, as for predict [the spec's].")
    ] = None,
    by: Annotated[
        str,
        typer.Option(
            help="What ranks: energy_per_token_j, energy_per_request_j, tpot_s, ttft_s, ttlt_s."
        ),
    ] = "energy_per_request_j",
    anchor: AnchorFiles = None,
    bundle: Bundles = None,
    as_json: Json = False,
) -> None:
    """Which single change of a deployment saves most: joules and milliseconds of each."""
    from energylens import api
    from energylens.predict import Catalogue
    from energylens.report.advice import advice_document, advice_infeasible_document, advice_table
    from energylens.results import Infeasible

    catalogue = Catalogue(bundle_files=tuple(bundle or ()))
    profile = find_engine(catalogue, engine, f"energylens advise {spec}")
    degrees = api.parallelism(
        gpus=gpus,
        tp=tp,
        ep=ep,
        pp=pp,
        dp=dp,
        replicas=replicas,
        overlap=parse_overlap(overlap),
    )
    result = api.advise(
        spec,
        device=device,
        engine=profile,
        **degrees.degrees,
        overlap=degrees.overlap,
        batch=batch,
        prompt_len=prompt_len,
        gen_len=gen_len,
        modes=parse_modes(mode or []),
        power_limit_w=check_positive("--power-limit", power_limit),
        routing=routing,
        by=by,
        anchors=load_anchors(anchor),
        catalogue=catalogue,
    )
    if not isinstance(result, Infeasible):
        show(advice_document(result) if as_json else advice_table(result))
        return
    if as_json:
        show(
            advice_infeasible_document(
                result,
                spec=catalogue.spec(spec).name,
                device=catalogue.device(device).name,
                engine=profile.name,
                parallelism=degrees,
                workload=Workload(batch=batch, prompt_len=prompt_len, gen_len=gen_len),
            )
        )
    raise typer.Exit(fail("infeasible", result.reason, EXIT_INFEASIBLE))
