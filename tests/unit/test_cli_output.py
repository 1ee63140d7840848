"""Where results may go: told before the work, and nothing is made by looking."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from command import error_of

from energylens.cli.output import check_output
from energylens.errors import SpecError

pytestmark = pytest.mark.usefixtures("no_debug")


@pytest.mark.parametrize(
    "words",
    [
        ["explore", "llama3_8b", "--gpus", "1", "--csv"],
        ["explore", "llama3_8b", "--gpus", "1", "--plot"],
        ["explore", "llama3_8b", "--gpus", "1", "--html"],
        ["validate", "truth.csv", "--report"],
        ["validate", "truth.csv", "--plot"],
        ["profile", "llama3_8b", "--out"],
        ["profile", "llama3_8b", "--power-timeline"],
        ["sweep", "grid.yaml", "--out"],
        ["sweep", "grid.yaml", "--csv"],
        ["import", ".", "--out"],
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
def test_a_missing_folder_is_named_and_not_made(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    suffix = {"--plot": ".png", "--html": ".html", "--report": ".md"}.get(words[-1], ".csv")
    path = Path(f"runs/may/new{'.yaml' if words[0] == 'import' else suffix}")
    line = error_of(capsys, *words, str(path))
    told = f"{words[-1]}: {path} cannot be written (there is no folder runs/may; make it, "
    assert line.startswith(f"energylens: error: {told}")
    assert not list(tmp_path.iterdir())


def test_a_good_place_is_left_as_it_is(tmp_path: Path) -> None:
    old = tmp_path / "old.csv"
    old.write_text("mine\n", encoding="utf-8")
    for path in (None, old, tmp_path / "new.csv"):
        check_output("--csv", path, (".csv",))
    assert [p.name for p in tmp_path.iterdir()] == ["old.csv"]
    assert old.read_text(encoding="utf-8") == "mine\n"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "it is a folder; choose another name"),
        ("/dev/null", "it is no file; choose another name"),
        ("file/new.csv", "there is no folder"),
        ("n" * 300, "File name too long; choose another place"),
    ],
)
def test_what_can_be_no_file_is_refused(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpecError) as error:
        check_output("--csv", tmp_path / name)
    assert f"--csv: {tmp_path / name} cannot be written ({why}" in str(error.value)


@pytest.mark.parametrize(
    ("closed", "why"),
    [
        (Path.is_dir, "no permission to write into"),
        (Path.is_file, "no permission to write it"),
    ],
)
def test_what_may_not_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: Callable[[Path], bool], why: str
) -> None:
    path = tmp_path / "old.csv"
    path.touch()
    # Root may write whatever the mode says.
    monkeypatch.setattr(os, "access", lambda asked, mode: not closed(asked))
    with pytest.raises(SpecError, match=why):
        check_output("--csv", path)
