"""Notebooks run, in smoke mode, and the value that each asserts holds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.py")), ids=lambda p: p.stem)
def test_a_notebook_runs_in_smoke_mode(path, tmp_path):
    environment = os.environ | {"SMOKE": "1", "PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        [sys.executable, str(path)], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert "J/token" in found.stdout
