"""Running the command line inside a test."""

import json
from typing import Any

import pytest

from energylens.cli import main

Capture = pytest.CaptureFixture[str]


def run_json(capsys: Capture, *arguments: str) -> dict[str, Any]:
    """The document of a run that succeeds with ``--json``."""
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert isinstance(document, dict)
    return document


def error_of(capsys: Capture, *arguments: str, code: int = 2) -> str:
    """The one line of a run that fails with ``code`` and leaves stdout empty."""
    assert main(list(arguments)) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    return err.strip()
