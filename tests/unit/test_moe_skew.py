"""The public check of skewed experts: the loads that the table was measured with, and its skip."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import numpy as np
import pytest


@pytest.fixture(scope="module")
def skew() -> ModuleType:
    return importlib.import_module("moe_skew")


@pytest.mark.parametrize("tokens", [1, 3, 16, 48, 8192])
def test_balanced_loads_are_as_even_as_whole_rows_can_be(skew: ModuleType, tokens: int) -> None:
    layer = skew.Layer(experts=128, topk=8, width=2048, hidden=768)
    counts = skew.balanced_counts(layer, tokens)
    assert counts.sum() == 8 * tokens
    assert (counts > 0).sum() == min(128, 8 * tokens)
    assert counts.max() == -(-tokens // 16)


@pytest.mark.parametrize("tokens", [1, 16, 17, 8192])
def test_power_law_loads_are_conserved_and_no_token_chooses_twice(
    skew: ModuleType, tokens: int
) -> None:
    layer, rng = skew.Layer(experts=128, topk=8, width=2048, hidden=768), np.random.default_rng(0)
    for _ in range(20):
        counts = skew.power_law_counts(layer, tokens, 1.2, rng)
        assert counts.sum() == 8 * tokens
        assert counts.min() >= 0
        assert counts.max() <= tokens


def test_the_fullest_rank_is_measured(skew: ModuleType) -> None:
    load = skew.fullest(np.array([1, 0, 2, 3]), 2)
    assert (load.experts, load.rows, load.active, load.largest) == (2, 5, 2, 3)


def test_without_the_table_the_check_is_skipped_and_says_so(
    skew: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["moe_skew.py", "/no/such/table.csv"])
    skew.main()
    assert capsys.readouterr().out.startswith("skipped: no /no/such/table.csv; give the MoE table")
