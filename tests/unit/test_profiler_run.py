"""Starting workers and showing progress: what the user sees, what is kept when they fail."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from made_profile import run as made
from rich.console import Console

from energylens.errors import EnergyLensError, SpecError, UnsupportedError
from energylens.profiler import run as runner
from energylens.profiler import workers
from energylens.profiler.options import ProfileRequest
from energylens.profiler.plugins import load_plugins
from energylens.profiler.progress import bar
from energylens.spec.system import Parallelism

TWO = ProfileRequest(model="llama3_2_1b", parallelism=Parallelism(tp=2))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Workers that leave ``document`` behind and end with ``code``."""
    told: dict[str, Any] = {"code": 0, "document": None}

    def start(request: ProfileRequest, out: Path, count: int) -> int:
        told["count"] = count
        if told["document"] is not None:
            out.write_text(json.dumps(told["document"]), encoding="utf-8")
        if told["code"] == "ctrl-c":
            raise KeyboardInterrupt
        return int(told["code"])

    monkeypatch.setattr(workers, "start_workers", start)
    monkeypatch.setattr(runner, "_check_libraries", lambda request: None)
    monkeypatch.setattr(runner, "_has_foreign_processes", lambda: False)
    return told


def test_the_workers_document_is_the_runs(launched: dict[str, Any]) -> None:
    launched["document"] = made()
    saved: list[Any] = []
    assert runner.run(TWO, save=saved.append) == made()
    assert saved == [made()]
    assert launched["count"] == 2


def test_workers_that_end_early_leave_what_was_measured_as_not_valid(
    launched: dict[str, Any],
) -> None:
    launched |= {"document": made(), "code": 9}
    document = runner.run(TWO)
    assert document["valid"] is False
    assert document["reasons"] == ["the workers ended early (exit code 9)"]


def test_an_interruption_keeps_what_the_workers_saved(launched: dict[str, Any]) -> None:
    launched |= {"document": made(), "code": "ctrl-c"}
    assert runner.run(TWO)["valid"] is False


def test_a_complaint_of_a_worker_is_the_runs(launched: dict[str, Any]) -> None:
    launched["document"] = {"error": "--tp 2: does not divide", "exit_code": 3}
    with pytest.raises(EnergyLensError, match="--tp 2: does not divide") as caught:
        runner.run(TWO)
    assert caught.value.exit_code == 3


def test_workers_that_leave_nothing_are_an_error(launched: dict[str, Any]) -> None:
    launched["code"] = 1
    with pytest.raises(UnsupportedError, match=r"the 2 workers failed .exit code 1. before"):
        runner.run(TWO)


def test_missing_libraries_are_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UnsupportedError, match=r"profile needs torch and transformers; pip install"
    ):
        runner.run(TWO)


def test_the_reduce_strategy_is_the_workers_nccl_algorithm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The launcher is replaced by a program that shows its environment and arguments."""
    seen: dict[str, Any] = {}

    class Done:
        returncode = 0

    def start(command: list[str], **rest: Any) -> Done:
        seen.update(command=command, env=rest["env"])
        return Done()

    monkeypatch.setattr("subprocess.run", start)
    request = ProfileRequest(model="m", reduce_strategy="tree", parallelism=Parallelism(tp=4))
    assert workers.start_workers(request, tmp_path / "profile.json", 4) == 0
    assert seen["env"]["NCCL_ALGO"] == "Tree"
    assert "--nproc_per_node=4" in seen["command"]
    asked = Path(seen["command"][-2])
    assert ProfileRequest.from_json(asked.read_text(encoding="utf-8")) == request


@pytest.mark.parametrize("terminal", [False, True])
def test_there_is_a_bar_on_a_terminal_only(terminal: bool) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=60)
    with bar(console) as progress:
        progress.start("decode")
        progress.share(0.5)
        progress.note("[said] once")
    assert "[said] once\n" in text.getvalue()
    assert ("decode" in text.getvalue()) is terminal
    if not terminal:
        assert text.getvalue() == "[said] once\n"


def test_calibrate_draws_no_bar_into_a_file_either() -> None:
    from energylens.bench.calibrate import _bar

    text = io.StringIO()
    with _bar(Console(file=text, width=60)) as progress:
        progress.start("anchors", 20.0)
        progress.step("anchors", 1.0)
        progress.note("said")
    assert text.getvalue() == "said\n"


def test_a_plugin_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"--plugin .*none.py: no such file"):
        load_plugins([str(tmp_path / "none.py")])
    with pytest.raises(SpecError, match="--plugin no_such_module_here: "):
        load_plugins(["no_such_module_here"])
