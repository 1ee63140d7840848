"""The command line: one verb, one library call. Everything heavy is imported inside the verb."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

# The matrices here have a few hundred rows: a second BLAS thread only spins, on a loaded machine
# for seconds. Set before NumPy is first imported, and only where the user said nothing.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from energylens import __version__
from energylens.cli.advise import advise
from energylens.cli.calibrate import calibrate
from energylens.cli.explore import explore
from energylens.cli.import_ import import_spec
from energylens.cli.known import doctor, list_known
from energylens.cli.output import EXIT_FAILURE, EXIT_INPUT, EXIT_INTERRUPTED, fail
from energylens.cli.predict import predict
from energylens.cli.profile import profile
from energylens.cli.sweep import sweep
from energylens.cli.validate import validate
from energylens.errors import EnergyLensError

__all__ = ["app", "main"]

_EXTRAS = {
    "torch": "gpu",
    "transformers": "gpu",
    "pynvml": "gpu",
    "sklearn": "gpu",
    "pandas": "gpu",
    "jtop": "jetson",
    "vllm": "vllm",
    "matplotlib": "plot",
    "joblib": "sweep",
    "dask": "dask",
    "distributed": "dask",
    "ray": "ray",
}
"""Optional library -> the extra that brings it."""


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
        return fail("error", str(error), error.exit_code)
    except _UsageError as error:
        return fail("error", _usage_message(error), EXIT_INPUT)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            return _unexpected(error)
        text = f"{error.name} is not installed; pip install '.[{extra}]' in the checkout"
        return fail("error", text, EXIT_INPUT)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return fail("error", f"{where}{error.strerror or error}", EXIT_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        return fail("interrupted", "what was measured so far is kept", EXIT_INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - the edge of the process: no traceback gets out
        return _unexpected(error)


def _unexpected(error: Exception) -> int:
    text = f"{type(error).__name__}: {error}; ENERGYLENS_DEBUG=1 shows where"
    return fail("unexpected failure", text, EXIT_FAILURE)


def _log_to_stderr() -> None:
    logger = logging.getLogger("energylens")
    if not any(isinstance(h, _StderrHandler) for h in logger.handlers):
        logger.addHandler(_StderrHandler())


class _StderrHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"energylens: {record.levelname.lower()}: {record.getMessage()}\n")


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


app.command()(predict)
app.command()(explore)
app.command()(advise)
app.command()(sweep)
app.command()(validate)
app.command()(profile)
app.command(name="import")(import_spec)
app.command(name="list")(list_known)
app.command()(doctor)
app.command()(calibrate)
