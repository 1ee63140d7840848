"""What the pages say exists: verbs, flags, commands of README and of the check."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from energylens.cli import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
)


def commands() -> dict[str, set[str]]:
    """Verb -> its flags."""
    root = typer.main.get_command(app)
    return {
        name: {opt for p in command.params for opt in (*p.opts, *p.secondary_opts)}
        for name, command in root.commands.items()  # type: ignore[attr-defined]
    }


@pytest.mark.parametrize("page", PAGES)
def test_commands_on_the_pages_exist_with_their_flags(page: str) -> None:
    known = commands()
    text = (ROOT / page).read_text(encoding="utf-8")
    mentioned = re.findall(r"\benergylens ([a-z]+)\b([^`\n]*)", text)
    assert mentioned
    for verb, rest in mentioned:
        assert verb in known, f"{page}: energylens {verb}"
        for flag in re.findall(r"--[a-z_-]+", rest):
            assert flag in known[verb], f"{page}: energylens {verb} {flag}"


def test_the_profilers_page_names_every_flag_of_its_own() -> None:
    text = (ROOT / "docs" / "profiler.md").read_text(encoding="utf-8")
    missing = {flag for flag in commands()["profile"] if "_" not in flag and flag not in text}
    assert missing == set()


def test_readme_names_every_verb() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {verb for verb in commands() if f"`energylens {verb}" not in text} == set()


def test_the_check_installs_and_tests_as_the_readme_says() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    check = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "pip install . --group test && .venv/bin/pytest" in readme
    assert " . --group test" in check
    assert check.rstrip().splitlines()[-1].startswith('"$bin/pytest"')
