"""The command line: one verb, one library call. Everything heavy is imported inside the verb."""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

# The matrices here have a few hundred rows: a second BLAS thread only spins, on a loaded machine
# for seconds. Set before NumPy is first imported, and only where the user said nothing.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from energylens import __version__
from energylens.errors import EnergyLensError, SpecError
from energylens.spec.system import Config, Mode, Parallelism, Phase, Workload
from energylens.units import BYTES_PER_GB

if TYPE_CHECKING:
    from rich.console import RenderableType

    from energylens.predict import Catalogue
    from energylens.results import Anchors, Measurement
    from energylens.serving import Traffic
    from energylens.spec.model import Spec
    from energylens.spec.system import Device as DeviceSheet
    from energylens.spec.system import Engine as EngineProfile

EXIT_FAILURE, EXIT_INPUT, EXIT_INFEASIBLE, EXIT_INTERRUPTED = 1, 2, 3, 130

_EXTRAS = {
    "torch": "gpu",
    "transformers": "gpu",
    "pynvml": "gpu",
    "sklearn": "gpu",
    "pandas": "gpu",
    "jtop": "jetson",
    "vllm": "vllm",
    "matplotlib": "plot",
}
"""Optional library -> the extra that brings it."""

_MAX_INTEGER = 65536
"""Largest batch or degree of a list; longer ranges would fill the memory before any is tried."""

_T = TypeVar("_T")

# Base of every complaint about arguments; typer exports only this subclass of it.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="energylens",
    help="Predict the joules and seconds of LLM inference before anything is deployed.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]
Device = Annotated[
    str, typer.Option(help="Device by name (`energylens list devices`) or YAML file.")
]
Engine = Annotated[
    str,
    typer.Option(
        help="Engine profile by name (`energylens list engines`), name@version, or YAML file."
    ),
]
Bundles = Annotated[
    list[Path] | None,
    typer.Option("--bundle", help="Calibration bundle to use instead of the shipped ones."),
]
AnchorFiles = Annotated[
    list[Path] | None,
    typer.Option("--anchor", help="Anchor file of the boards or the host; repeatable."),
]
Without = Annotated[
    str | None,
    typer.Option(
        help="Composition laws to leave out, joined by commas: cap, host, straggler, gap."
    ),
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code (DESIGN section 5); no traceback gets out.

    Args:
        argv: arguments without the program's name; the process's own by default.
    """
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    _log_to_stderr()
    try:
        return int(app(arguments, prog_name="energylens", standalone_mode=False) or 0)
    except EnergyLensError as error:
        return _fail("error", str(error), error.exit_code)
    except _UsageError as error:
        return _fail("error", _usage_message(error), EXIT_INPUT)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            return _unexpected(error)
        text = f"{error.name} is not installed; pip install '.[{extra}]' in the checkout"
        return _fail("error", text, EXIT_INPUT)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail("error", f"{where}{error.strerror or error}", EXIT_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", "what was measured so far is kept", EXIT_INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - the edge of the process: no traceback gets out
        return _unexpected(error)


def _unexpected(error: Exception) -> int:
    text = f"{type(error).__name__}: {error}; ENERGYLENS_DEBUG=1 shows where"
    return _fail("unexpected failure", text, EXIT_FAILURE)


def _log_to_stderr() -> None:
    logger = logging.getLogger("energylens")
    if not any(isinstance(h, _StderrHandler) for h in logger.handlers):
        logger.addHandler(_StderrHandler())


class _StderrHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"energylens: {record.levelname.lower()}: {record.getMessage()}\n")


def _fail(what: str, message: str, code: int) -> int:
    if os.environ.get("ENERGYLENS_DEBUG"):
        traceback.print_exc()
    sys.stderr.write(f"energylens: {what}: {' '.join(message.split())}\n")
    return code


def _usage_message(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    hint = f" (see `{context.command_path} --help`)" if context else ""
    message: str = getattr(error, "format_message", error.__str__)()
    return f"{message}{hint}"


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"energylens {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Predict the joules and seconds of LLM inference before anything is deployed."""


@app.command()
def predict(
    spec: Annotated[
        str,
        typer.Argument(metavar="SPEC", help="Model by name (`energylens list specs`) or file."),
    ],
    phase: Annotated[str, typer.Option(help="prefill, decode, request, or all.")] = "all",
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
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
    dp: Annotated[int | None, typer.Option(help="Attention data parallel degree.")] = None,
    replicas: Annotated[int | None, typer.Option(help="Independent copies.")] = None,
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
        int | None, typer.Option(help="Most sequences that run at a time [the engine's own].")
    ] = None,
    steady_state: Annotated[
        bool,
        typer.Option("--steady-state", help="Refuse a rate that the service does not sustain."),
    ] = False,
    anchor: AnchorFiles = None,
    bundle: Bundles = None,
    without: Without = None,
    as_json: Json = False,
) -> None:
    """Latency and energy of one configuration, or of a service under traffic (--rate)."""
    from energylens.predict import Catalogue, predict
    from energylens.report import infeasible_document, prediction_document, prediction_table
    from energylens.results import Infeasible

    traffic = _traffic(
        rate,
        (prompt_len, gen_len),
        {
            "--arrivals": arrivals,
            "--lengths": lengths,
            "--duration": _positive("--duration", duration),
            "--seed": seed,
            "--max-batch-tokens": max_batch_tokens,
            "--max-num-seqs": max_num_seqs,
            "--steady-state": steady_state or None,
        },
        {
            "--phase": phase != "all",
            "--batch": batch != 1,
            "--context-len": context_len is not None,
            "--mode": bool(mode),
            "--without": without is not None,
        },
    )
    catalogue = Catalogue(bundle_files=tuple(bundle or ()))
    workload = Workload(
        batch=batch,
        prompt_len=prompt_len,
        gen_len=gen_len,
        context_len=_positive("--context-len", context_len),
    )
    parallelism = _parallelism(gpus=gpus, tp=tp, ep=ep, pp=pp, dp=dp, replicas=replicas)
    model, profile, board = (
        catalogue.spec(spec),
        _engine(catalogue, engine, f"energylens predict {spec}"),
        catalogue.device(device),
    )
    anchors = _load_anchors(anchor)
    _check_anchors(anchors, board.name)
    config = Config(
        parallelism=parallelism,
        modes=_modes(mode or []),
        power_limit_w=_positive("--power-limit", power_limit),
        routing=routing,
        redundant_experts=redundant_experts,
    )
    bundles, link = catalogue.bundles(board, profile), catalogue.link(board, parallelism.gpus)
    if traffic is not None:
        _serve(
            model,
            traffic,
            (max_batch_tokens, max_num_seqs),
            steady_state=steady_state,
            as_json=as_json,
            engine=profile,
            device=board,
            config=config,
            bundles=bundles,
            anchors=anchors,
            link=link,
        )
        return
    result = predict(
        model,
        engine=profile,
        device=board,
        config=config,
        workload=workload,
        bundles=bundles,
        anchors=anchors,
        phases=_phases(phase),
        without=_laws(without),
        link=link,
    )
    if not isinstance(result, Infeasible):
        _show(prediction_document(result) if as_json else prediction_table(result))
        return
    if as_json:
        _show(
            infeasible_document(
                result,
                spec=model.name,
                device=board.name,
                engine=profile.name,
                parallelism=parallelism,
                workload=workload,
            )
        )
    raise typer.Exit(_fail("infeasible", result.reason, EXIT_INFEASIBLE))


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
        rate_per_s=_positive("--rate", rate),
        lengths=read_lengths(file) if file else (lengths,),
        duration_s=options["--duration"],
        seed=options["--seed"] or 0,
    )


def _serve(
    model: Spec,
    traffic: Traffic,
    limits: tuple[int | None, int | None],
    *,
    as_json: bool,
    engine: EngineProfile,
    device: DeviceSheet,
    config: Config,
    **rest: Any,
) -> None:
    """Simulate a service and show what comes out."""
    from energylens.report import serving_document, serving_infeasible_document, serving_table
    from energylens.results import Infeasible
    from energylens.serving import Limits, serve

    result = serve(
        model,
        traffic=traffic,
        limits=Limits(batch_tokens=limits[0], max_sequences=limits[1]),
        engine=engine,
        device=device,
        config=config,
        **rest,
    )
    if not isinstance(result, Infeasible):
        _show(serving_document(result) if as_json else serving_table(result))
        return
    if as_json:
        _show(
            serving_infeasible_document(
                result,
                spec=model.name,
                device=device.name,
                engine=engine.name,
                parallelism=config.parallelism,
            )
        )
    raise typer.Exit(_fail("infeasible", result.reason, EXIT_INFEASIBLE))


@app.command()
def explore(
    spec: Annotated[
        str,
        typer.Argument(metavar="SPEC", help="Model by name (`energylens list specs`) or file."),
    ],
    gpus: Annotated[int, typer.Option(help="GPUs to use; replicas fill them.")],
    prompt_len: Annotated[int, typer.Option(help="Prompt tokens of each sequence.")] = 1024,
    gen_len: Annotated[
        int, typer.Option(help="Generated tokens, the one that prefill makes included.")
    ] = 128,
    batch: Annotated[
        str, typer.Option(help="Sequences of a replica: 1..256 (every one), 1,16,64, or both.")
    ] = "1..256",
    tp: Annotated[
        str | None, typer.Option(help="Tensor parallel degrees, e.g. 1,2,4 [all that divide].")
    ] = None,
    ep: Annotated[
        str | None, typer.Option(help="Expert parallel degrees [1 and all workers].")
    ] = None,
    dp: Annotated[
        str | None, typer.Option(help="Attention data parallel degrees [all, with experts].")
    ] = None,
    device: Device = "h200",
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
            "energy_per_prompt, ttft, tpot, throughput, throughput_per_gpu, gpus "
            "[energy_per_token,tpot]."
        ),
    ] = None,
    top: Annotated[
        int, typer.Option(help="Most configurations to predict exactly, and to show.")
    ] = 20,
    anchor: AnchorFiles = None,
    bundle: Bundles = None,
    csv: Annotated[Path | None, typer.Option(help="File for all configurations.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Image (.png, .svg, .pdf) of the front.")
    ] = None,
    as_json: Json = False,
) -> None:
    """The Pareto front of all parallel layouts and batches: joules against milliseconds."""
    from energylens.explore import DEFAULT_OBJECTIVES, Constraints, SearchSpace
    from energylens.explore import explore as search
    from energylens.files import write_atomically
    from energylens.predict import Catalogue
    from energylens.report import (
        figure,
        frontier_csv,
        frontier_document,
        frontier_infeasible_document,
        frontier_plot,
        frontier_table,
    )
    from energylens.results import Infeasible

    _check_output("--csv", csv)
    _check_output("--plot", plot, (".png", ".svg", ".pdf"))
    if plot is not None:
        if gen_len < 2:
            raise SpecError("--plot is about time per token; give --gen-len of 2 or more")
        figure()
    catalogue = Catalogue(bundle_files=tuple(bundle or ()))
    model, board = catalogue.spec(spec), catalogue.device(device)
    profile = _engine(catalogue, engine, f"energylens explore {spec} --gpus {gpus}")
    anchors = _load_anchors(anchor)
    _check_anchors(anchors, board.name)
    result = search(
        model,
        engine=profile,
        device=board,
        gpus=gpus,
        prompt_len=prompt_len,
        gen_len=gen_len,
        space=SearchSpace(
            batches=_integers("--batch", batch),
            tp=_integers("--tp", tp) if tp else None,
            ep=_integers("--ep", ep) if ep else None,
            dp=_integers("--dp", dp) if dp else None,
        ),
        constraints=Constraints(
            max_ttft_s=_seconds("--max-ttft-ms", max_ttft_ms),
            max_tpot_s=_seconds("--max-tpot-ms", max_tpot_ms),
            max_power_w=_positive("--max-w", max_w),
            min_throughput_tokens_s=_positive("--min-throughput", min_throughput),
        ),
        objectives=DEFAULT_OBJECTIVES if objective is None else _parts(objective),
        exact=top,
        power_limit_w=_positive("--power-limit", power_limit),
        routing=routing,
        bundles=catalogue.bundles(board, profile),
        anchors=anchors,
        link=catalogue.link(board, gpus),
    )
    if isinstance(result, Infeasible):
        if as_json:
            _show(
                frontier_infeasible_document(
                    result, spec=model.name, device=board.name, engine=profile.name, gpus=gpus
                )
            )
        raise typer.Exit(_fail("infeasible", result.reason, EXIT_INFEASIBLE))
    given = [("--device", device), ("--engine", engine)]
    given += [(n, str(v)) for n, v in (("--routing", routing), ("--power-limit", power_limit)) if v]
    given += [("--anchor", str(path)) for path in anchor or ()]
    given += [("--bundle", str(path)) for path in bundle or ()]
    command = shlex.join(["energylens", "predict", spec, *(w for pair in given for w in pair)])
    if csv is not None:
        write_atomically(csv, frontier_csv(result))
    if plot is not None:
        frontier_plot(result, plot)
    _show(frontier_document(result, command) if as_json else frontier_table(result, command))


@app.command()
def validate(
    truth: Annotated[
        list[Path], typer.Argument(metavar="TRUTH...", help="One or more truth CSV files.")
    ],
    by: Annotated[
        str | None, typer.Option(help="Fields that make groups, e.g. engine,phase,spec,tp.")
    ] = None,
    ignore_anchors: Annotated[
        bool, typer.Option("--ignore-anchors", help="Predict all rows as a typical board.")
    ] = False,
    anchor: AnchorFiles = None,
    bundle: Bundles = None,
    without: Without = None,
    as_json: Json = False,
) -> None:
    """Predictions against measurements: errors, bias, rank correlation, interval coverage."""
    from energylens.predict import Catalogue, predict_measurement
    from energylens.report import validation_document, validation_table
    from energylens.truth import read_measurements
    from energylens.validate import validate

    catalogue, laws = Catalogue(bundle_files=tuple(bundle or ())), _laws(without)
    given = _load_anchors(anchor)
    result = validate(
        [_with_anchors(m, given) for m in read_measurements(truth)],
        lambda m, anchors: predict_measurement(
            m, anchors=anchors, without=laws, catalogue=catalogue
        ),
        by=_parts(by),
        ignore_anchors=ignore_anchors,
    )
    _show(validation_document(result) if as_json else validation_table(result))


@app.command(name="list")
def list_known(
    kind: Annotated[
        str | None, typer.Argument(help="specs, devices, engines, clusters or bundles [all].")
    ] = None,
    as_json: Json = False,
) -> None:
    """What is known: models, devices, engines, clusters, calibration bundles."""
    from energylens.predict import Catalogue
    from energylens.report import listing_document, listing_table

    kinds = ("specs", "devices", "engines", "clusters", "bundles")
    chosen = kinds if kind is None else (_choice("list", kind, {k: k for k in kinds}),)
    catalogue = Catalogue()
    known = {k: {n: _describe(catalogue, k, n) for n in catalogue.list(k)} for k in chosen}
    _show(listing_document(known) if as_json else listing_table(known))


@app.command()
def doctor(as_json: Json = False) -> None:
    """What this machine can measure, and why not."""
    from energylens.meter.doctor import diagnose
    from energylens.report import doctor_document, doctor_text

    document = doctor_document(asdict(diagnose(os.environ)))
    _show(document if as_json else doctor_text(document))


@app.command()
def calibrate(
    device: Annotated[
        str | None, typer.Option(help="Device that must be present [the one found].")
    ] = None,
    gpus: Annotated[int, typer.Option(help="GPUs; from 2 on, collectives are measured too.")] = 1,
    for_spec: Annotated[
        list[str] | None,
        typer.Option(
            "--for", help="Models whose per-worker shapes to measure; repeat or join by commas."
        ),
    ] = None,
    tp: Annotated[str, typer.Option(help="Degrees of --for, joined by commas.")] = "1",
    plan: Annotated[Path | None, typer.Option(help="Plan file instead of --for.")] = None,
    provider: Annotated[str, typer.Option(help="Whose kernels to measure.")] = "torch",
    minutes: Annotated[
        float | None, typer.Option(help="Time to spend [until all is measured].")
    ] = None,
    anchor: Annotated[
        bool, typer.Option("--anchor", help="Only fit the boards and the host: 20 s a board.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for samples, bundle and anchors.")] = Path(
        "calibration"
    ),
    resume: Annotated[
        bool,
        typer.Option("--resume/--fresh", help="Go on where the last run stopped, or start anew."),
    ] = True,
    fit_only: Annotated[
        bool, typer.Option("--fit-only", help="Measure nothing, fit the samples that are there.")
    ] = False,
    blocks: Annotated[
        str | None,
        typer.Option(help="Only these: collectives, ops, mixes, host; joined by commas."),
    ] = None,
    nccl_algo: Annotated[
        str, typer.Option(help="NCCL algorithm of the collectives, e.g. Ring or Tree [NCCL's own].")
    ] = "",
    seed: Annotated[int, typer.Option(help="Seed of the measuring order.")] = 0,
    as_json: Json = False,
) -> None:
    """Measure kernels or anchors on the GPUs present; write samples and a bundle."""
    from energylens.bench.calibrate import run
    from energylens.report import facts_text

    found = run(
        device=device,
        gpus=gpus,
        specs=tuple(name for text in for_spec or () for name in _parts(text)),
        tp=_degrees(tp),
        plan=plan,
        provider=provider,
        minutes=_positive("--minutes", minutes),
        anchor=anchor,
        out=out,
        resume=resume,
        fit_only=fit_only,
        seed=seed,
        blocks=_parts(blocks) or None,
        nccl_algo=nccl_algo,
        fit=_fit,
    )
    _show(found if as_json else facts_text(found))


def _fit(
    folders: Sequence[Path], device: DeviceSheet, provider: str, bundle_file: Path
) -> Mapping[str, Any]:
    """Fit the samples of ``folders``, write the bundle, and say how good it is."""
    from energylens.cost.bundle import dump_bundle, load_bundle
    from energylens.files import write_atomically
    from energylens.fit import fit_bundle, load_one_shot, load_published
    from energylens.spec.load import data_dir

    folder = data_dir("calibration") / "published"
    table, one_shot = folder / "nccl_latency.csv", folder / "one_shot_all_reduce.csv"
    bundle, quality = fit_bundle(
        folders,
        device=device,
        provider=provider,
        published=load_published(table, device.name) if table.exists() else None,
        one_shot=load_one_shot(one_shot) if provider == "vllm" else None,
    )
    write_atomically(bundle_file, dump_bundle(bundle))
    steps = [
        {"step": label, "latency_error_pct": latency, "energy_error_pct": energy}
        for label, (latency, energy) in quality.mixes.items()
    ]
    return {**asdict(load_bundle(bundle_file).ref), **asdict(quality), "mixes": steps}


def _show(result: Mapping[str, Any] | RenderableType) -> None:
    """Write a result to stdout: a mapping as JSON, a text as it is, anything else as a table."""
    if isinstance(result, Mapping):
        result = json.dumps(result, indent=2, allow_nan=False)
    if not isinstance(result, str):
        from rich.console import Console
        from rich.measure import Measurement as Extent

        def console_of(width: int | None) -> Console:
            return Console(width=width, highlight=False, markup=False, emoji=False)

        wide = console_of(1000)
        needed = Extent.get(wide, wide.options, result).minimum
        console = console_of(None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160)
        if needed > console.width:  # a row that runs on is easier to read than one cut to pieces
            console = console_of(needed)
        with console.capture() as text:
            console.print(result)
        result = "\n".join(line.rstrip() for line in text.get().splitlines())
    try:
        sys.stdout.write(f"{result}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`head`, say) has seen enough; what Python flushes at exit must go somewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parts(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def _choice(option: str, text: str, allowed: Mapping[str, _T]) -> _T:
    if text not in allowed:
        raise SpecError(f"{option}: unknown value {text!r}; allowed: {', '.join(allowed)}")
    return allowed[text]


def _phases(text: str) -> tuple[Phase, ...]:
    allowed = {phase.value: (phase,) for phase in Phase} | {"all": tuple(Phase)}
    chosen = {p for part in _parts(text) for p in _choice("--phase", part, allowed)}
    if not chosen:
        raise SpecError(f"--phase: {text!r} names no phase; allowed: {', '.join(allowed)}")
    return tuple(phase for phase in Phase if phase in chosen)


def _modes(texts: Sequence[str]) -> dict[Phase, Mode]:
    """``[PHASE=]MODE`` of each text; a mode alone is for both phases, a CUDA graph for decode."""
    phases = {phase.value: phase for phase in (Phase.PREFILL, Phase.DECODE)}
    modes: dict[Phase, Mode] = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        mode = _choice("--mode", value, {m.value: m for m in Mode})
        if name:
            modes[_choice("--mode", name, phases)] = mode
        else:
            both = (Phase.DECODE,) if mode is Mode.CUDA_GRAPH else (Phase.PREFILL, Phase.DECODE)
            modes.update(dict.fromkeys(both, mode))
    return modes


def _parallelism(
    *,
    gpus: int | None,
    tp: int | None,
    ep: int,
    pp: int | None,
    dp: int | None,
    replicas: int | None,
) -> Parallelism:
    given = {"tp": tp, "pp": pp, "dp": dp, "replicas": replicas}
    degrees = {name: n for name, n in given.items() if n is not None}
    if gpus is not None and not degrees:
        degrees = {"tp": gpus}
    parallelism = Parallelism(ep=ep, **degrees)
    if gpus is not None and gpus != parallelism.gpus:
        raise SpecError(
            f"--gpus is {gpus}, but replicas x dp x tp x pp = {parallelism.gpus}; "
            "change one of them, or give --gpus alone"
        )
    return parallelism


def _load_anchors(paths: Sequence[Path] | None) -> Anchors | None:
    if not paths:
        return None
    from energylens.anchors import load_anchors

    return load_anchors(*paths)


def _check_anchors(anchors: Anchors | None, device: str) -> None:
    for board in anchors.boards if anchors else ():
        if board.device != device:
            raise SpecError(
                f"--anchor: board {board.board_uuid} is of {board.device}, but --device is "
                f"{device}; give anchors of that device"
            )


def _engine(catalogue: Catalogue, name: str, command: str) -> EngineProfile:
    """The engine profile; where there is none, the error ends with a command that works."""
    try:
        return catalogue.engine(name)
    except SpecError as error:
        if Path(name).exists() or name.partition("@")[0] in catalogue.list("engines"):
            raise
        known = catalogue.list("engines")[0]
        raise SpecError(f"{error}; try `{command} --engine {known}`") from None


def _describe(catalogue: Catalogue, kind: str, name: str) -> str:
    """One line about a shipped spec, device, engine, cluster or bundle."""
    from energylens.cost.bundle import load_bundle
    from energylens.lower.memory import parameters
    from energylens.spec.load import data_dir, load_cluster

    if kind == "specs":
        spec = catalogue.spec(name)
        layers = sum(b.repeat for b in spec.blocks if b.repeat > 1)
        size = f"{parameters(spec) / 1e9:.3g} B parameters, {layers} layers"
        return f"{size}, {spec.precision.weights}; {spec.source}"
    if kind == "devices":
        d = catalogue.device(name)
        return (
            f"{d.memory_bytes / BYTES_PER_GB:.3g} GB, "
            f"{d.memory_bandwidth_bytes_s / 1e12:.3g} TB/s, "
            f"{d.peak_flops['bf16'] / 1e12:.3g} TFLOP/s bf16, {d.power_limit_w:g} W; "
            + ("calibrated" if catalogue.bundles(d, catalogue.engine("hf")) else "datasheet only")
        )
    if kind == "engines":
        engine = catalogue.engine(name)
        modes = ", ".join(f"{phase} {mode}" for phase, mode in engine.modes.items())
        return f"{engine.version}; default modes: {modes}; kernels of provider {engine.provider}"
    if kind == "clusters":
        cluster = load_cluster(name)
        return f"{cluster.gpus} x {cluster.device}" + (
            f", {cluster.link.name}" if cluster.link else ""
        )
    bundle = load_bundle(data_dir("calibration") / "bundles" / f"{name}.json")
    return (
        f"{bundle.version}, {len(bundle.boards)} boards at {bundle.power_limit_w:g} W, "
        f"torch {bundle.versions.get('torch', '-')}, sha256 {bundle.sha256[:12]}"
    )


def _with_anchors(measurement: Measurement, given: Anchors | None) -> Measurement:
    """The row with the given boards and host where it holds none of its own."""
    own = measurement.anchors
    if given is None or own is None:
        return replace(measurement, anchors=own or given)
    merged = replace(own, boards=own.boards or given.boards, host=own.host or given.host)
    return replace(measurement, anchors=merged)


def _laws(text: str | None) -> frozenset[str]:
    from energylens.schedule import LAWS

    allowed = {law: law for law in LAWS}
    return frozenset(_choice("--without", part, allowed) for part in _parts(text))


def _positive(option: str, value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise SpecError(f"{option}: {value:g} found, and must be a number above 0")
    return value


def _degrees(text: str) -> tuple[int, ...]:
    parts = _parts(text)
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise SpecError(f"--tp: {text!r} found, and must be degrees joined by commas, e.g. 1,2,4")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _integers(option: str, text: str) -> tuple[int, ...]:
    """``1,16,64``, ``1..256`` for every integer from the first to the last, or both."""
    found: list[int] = []
    for part in _parts(text):
        first, dots, last = part.partition("..")
        ends = (first, last) if dots else (first, first)
        if not all(end.isdecimal() and int(end) > 0 for end in ends) or int(ends[0]) > int(ends[1]):
            raise SpecError(
                f"{option}: {part!r} found, and must be a number above 0 or FIRST..LAST, "
                "e.g. 1,2,4 or 1..256"
            )
        if int(ends[1]) > _MAX_INTEGER:
            raise SpecError(f"{option}: {ends[1]} found, and must be at most {_MAX_INTEGER}")
        found += range(int(ends[0]), int(ends[1]) + 1)
    if not found:
        raise SpecError(f"{option}: {text!r} names no number; give e.g. 1,2,4 or 1..256")
    return tuple(dict.fromkeys(found))


def _seconds(option: str, milliseconds: float | None) -> float | None:
    given = _positive(option, milliseconds)
    return None if given is None else given * 1e-3


def _check_output(option: str, path: Path | None, suffixes: Sequence[str] = ()) -> None:
    """Refuse a file that cannot be written, before the work whose result it is for."""
    if path is None:
        return
    if suffixes and path.suffix not in suffixes:
        raise SpecError(f"{option}: {path} found, and must end in {', '.join(suffixes)}")
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise SpecError(
            f"{option}: {path} cannot be written ({error.strerror}); choose another place"
        ) from None
    if not existed:
        path.unlink()
