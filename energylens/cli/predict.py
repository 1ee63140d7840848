"""``energylens predict``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from energylens.cli.options import (
    AnchorFiles,
    Bundles,
    Device,
    Engine,
    Json,
    Overlap,
    Stored,
    Without,
    check_least,
    check_positive,
    find_engine,
    load_anchors,
    parse_choice,
    parse_laws,
    parse_modes,
    parse_overlap,
    parse_precision,
    split_list,
)
from energylens.cli.output import EXIT_INFEASIBLE, fail, show
from energylens.errors import SpecError
from energylens.spec.system import Config, Phase, Workload

if TYPE_CHECKING:
    from energylens.api import Setting
    from energylens.serving import Traffic


def predict(
    spec: Annotated[
        str,
        typer.Argument(metavar="SPEC", help="Model by name (`energylens list specs`) or file."),
    ],
    phase: Annotated[str, typer.Option(help="prefill, decode, request, or all.")] = "all",
    batch: Annotated[int, typer.Option(help="Sequences of each replica.")] = 1,
    prompt_len: Annotated[int, typer.Option(help="Prompt tokens of each sequence.")] = 1024,
    gen_len: Annotated[
        int, typer.Option(help="Generated tokens, the one that prefill makes included.")
    ] = 128,
    context_len: Annotated[
        float | None,
        typer.Option(help="Mean KV length of the decode step [prompt-len + gen-len / 2]."),
    ] = None,
    device: Device = "h200",
    engine: Engine = "vllm",
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="Launch mode, [PHASE=]eager|cuda_graph|serving; cuda_graph alone means decode."
        ),
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor parallel degree.")] = None,
    ep: Annotated[int, typer.Option(help="Expert parallel degree; adds no GPUs.")] = 1,
    pp: Annotated[int | None, typer.Option(help="Pipeline parallel degree.")] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(
            help="Parts of the batch in the stages of --pp at a time [one for each step of the "
            "prefill, --pp at most]."
        ),
    ] = None,
    dp: Annotated[int | None, typer.Option(help="Attention data parallel degree.")] = None,
    replicas: Annotated[int | None, typer.Option(help="Independent copies.")] = None,
    overlap: Overlap = None,
    gpus: Annotated[
        int | None, typer.Option(help="replicas x dp x tp x pp; given alone, it sets --tp.")
    ] = None,
    power_limit: Annotated[float | None, typer.Option(help="Power limit of each GPU in W.")] = None,
    routing: Annotated[
        str | None,
        typer.Option(
            help="How tokens choose experts: uniform, zipf:ALPHA, dirichlet:C, histogram:FILE, "
            "trace:FILE [the spec's]."
        ),
    ] = None,
    redundant_experts: Annotated[
        int, typer.Option(help="Experts held twice, the most popular ones.")
    ] = 0,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests/s: simulate a service under traffic instead of one batch."),
    ] = None,
    arrivals: Annotated[
        str | None,
        typer.Option(
            help="poisson, constant, or a file of arrival times in s, one a line [poisson]."
        ),
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(
            help="File with `prompt_len,gen_len` lines, used in order and cycled "
            "[--prompt-len, --gen-len]."
        ),
    ] = None,
    duration: Annotated[
        float | None, typer.Option(help="Seconds of traffic [600, or all of the file].")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the arrivals [0].")] = None,
    max_batch_tokens: Annotated[
        int | None, typer.Option(help="Most new tokens of a step [the engine's own].")
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            help="Most sequences that run at a time [the engine's own]; vLLM captures steps of "
            "twice as many tokens."
        ),
    ] = None,
    steady_state: Annotated[
        bool,
        typer.Option("--steady-state", help="Refuse a rate that the service does not sustain."),
    ] = False,
    precision: Stored = None,
    anchor: AnchorFiles = None,
    bundle: Bundles = None,
    without: Without = None,
    as_json: Json = False,
) -> None:
    """Latency and energy of one configuration, or of a service under traffic (--rate)."""
    from energylens import api
    from energylens.predict import Catalogue
    from energylens.report.prediction import (
        infeasible_document,
        prediction_document,
        prediction_table,
    )
    from energylens.results import Infeasible

    for name, most in (("--max-batch-tokens", max_batch_tokens), ("--max-num-seqs", max_num_seqs)):
        if most is not None:
            check_least(name, most)
    traffic = _traffic(
        rate,
        (prompt_len, gen_len),
        {
            "--arrivals": arrivals,
            "--lengths": lengths,
            "--duration": check_positive("--duration", duration),
            "--seed": seed,
            "--max-batch-tokens": max_batch_tokens,
            "--steady-state": steady_state or None,
        },
        {
            "--phase": phase != "all",
            "--batch": batch != 1,
            "--context-len": context_len is not None,
            "--mode": bool(mode),
            "--microbatches": microbatches is not None,
            "--without": without is not None,
        },
    )
    catalogue = Catalogue(bundle_files=tuple(bundle or ()))
    degrees = api.parallelism(
        gpus=gpus,
        tp=tp,
        ep=ep,
        pp=pp,
        dp=dp,
        replicas=replicas,
        overlap=parse_overlap(overlap),
    )
    named = api.setting(
        spec,
        device=device,
        engine=find_engine(catalogue, engine, f"energylens predict {spec}"),
        anchors=load_anchors(anchor),
        catalogue=catalogue,
        precision=parse_precision(precision),
    )
    watts = check_positive("--power-limit", power_limit)
    if traffic is not None:
        _serve(
            named,
            traffic,
            (max_batch_tokens, max_num_seqs),
            steady_state=steady_state,
            as_json=as_json,
            config=Config(
                parallelism=degrees,
                power_limit_w=watts,
                routing=routing,
                redundant_experts=redundant_experts,
            ),
        )
        return
    result = api.predict(
        named.spec,
        device=named.device,
        engine=named.engine,
        **degrees.degrees,
        overlap=degrees.overlap,
        batch=batch,
        prompt_len=prompt_len,
        gen_len=gen_len,
        context_len=check_positive("--context-len", context_len),
        phases=_phases(phase),
        modes=parse_modes(mode or []),
        power_limit_w=watts,
        routing=routing,
        redundant_experts=redundant_experts,
        microbatches=microbatches,
        max_num_seqs=max_num_seqs,
        without=parse_laws(without),
        anchors=named.anchors,
        catalogue=catalogue,
    )
    if not isinstance(result, Infeasible):
        show(prediction_document(result) if as_json else prediction_table(result))
        return
    if as_json:
        show(
            infeasible_document(
                result,
                spec=named.spec.name,
                device=named.device.name,
                engine=named.engine.name,
                parallelism=degrees,
                workload=Workload(
                    batch=batch, prompt_len=prompt_len, gen_len=gen_len, context_len=context_len
                ),
            )
        )
    raise typer.Exit(fail("infeasible", result.reason, EXIT_INFEASIBLE))


def _traffic(
    rate: float | None,
    lengths: tuple[int, int],
    options: Mapping[str, Any],
    others: Mapping[str, bool],
) -> Traffic | None:
    """The traffic that is asked for, or None where one batch is.

    Args:
        rate: ``--rate``.
        lengths: prompt and generated tokens where no file gives them.
        options: those of traffic, with what was given for them, or None.
        others: those that say nothing about traffic, and whether they were given.
    """
    given = [name for name, value in options.items() if value is not None]
    arrivals = options["--arrivals"] or "poisson"
    if rate is None and (not given or arrivals in ("poisson", "constant")):
        if given:
            raise SpecError(
                f"{given[0]} is about traffic; give its --rate, or --arrivals FILE with its times"
            )
        return None
    for name, found in others.items():
        if found:
            raise SpecError(f"{name} is about one batch, and --rate or --arrivals about traffic")
    from energylens.serving import Traffic, read_lengths

    file = options["--lengths"]
    return Traffic(
        arrivals=arrivals,
        rate_per_s=check_positive("--rate", rate),
        lengths=read_lengths(file) if file else (lengths,),
        duration_s=options["--duration"],
        seed=options["--seed"] or 0,
    )


def _serve(
    named: Setting,
    traffic: Traffic,
    limits: tuple[int | None, int | None],
    *,
    as_json: bool,
    steady_state: bool,
    config: Config,
) -> None:
    """Simulate a service and show what comes out."""
    from energylens.report.service import (
        serving_document,
        serving_infeasible_document,
        serving_table,
    )
    from energylens.results import Infeasible
    from energylens.serving import Limits, serve

    result = serve(
        named.spec,
        traffic=traffic,
        limits=Limits(batch_tokens=limits[0], max_sequences=limits[1]),
        steady_state=steady_state,
        engine=named.engine,
        device=named.device,
        config=config,
        bundles=named.bundles,
        anchors=named.anchors,
        link=named.link(config.parallelism.replica_gpus),
    )
    if not isinstance(result, Infeasible):
        show(serving_document(result) if as_json else serving_table(result))
        return
    if as_json:
        show(
            serving_infeasible_document(
                result,
                spec=named.spec.name,
                device=named.device.name,
                engine=named.engine.name,
                parallelism=config.parallelism,
            )
        )
    raise typer.Exit(fail("infeasible", result.reason, EXIT_INFEASIBLE))


def _phases(text: str) -> tuple[Phase, ...]:
    allowed = {phase.value: (phase,) for phase in Phase} | {"all": tuple(Phase)}
    chosen = {p for part in split_list(text) for p in parse_choice("--phase", part, allowed)}
    if not chosen:
        raise SpecError(f"--phase: {text!r} names no phase; allowed: {', '.join(allowed)}")
    return tuple(phase for phase in Phase if phase in chosen)
