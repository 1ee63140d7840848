"""The examples of docs/profiler.md are run as they stand on the page."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from energylens.errors import MeterError
from energylens.meter.base import require_energy
from energylens.profiler import LOADERS, METERS, METRICS
from energylens.profiler.options import ProfileRequest
from energylens.profiler.plugins import load_plugins

PAGE = Path(__file__).resolve().parents[2] / "docs" / "profiler.md"
EXAMPLES = dict(
    re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
)


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Any]:
    """Loads an example as ``--plugin`` does; afterwards all is as before."""
    lists = [(kept, list(kept)) for kept in (LOADERS, METRICS, METERS)]
    modules = set(sys.modules)

    def load(name: str) -> None:
        path = tmp_path / name
        path.write_text(EXAMPLES[name], encoding="utf-8")
        load_plugins([str(path)])

    yield load
    for kept, before in lists:
        kept[:] = before
    for module in set(sys.modules) - modules:
        if module.startswith("energylens_plugin_"):
            del sys.modules[module]


def test_there_is_an_example_of_each_kind() -> None:
    assert set(EXAMPLES) == {"mamba.py", "experts.py", "rapl.py"}


def measured(request: ProfileRequest, engine: Any) -> Any:
    from energylens.profiler.session import Session, Solo
    from energylens.profiler.steps import Limits

    quick = Limits(repeats=2, settle_s=0.0, window_s=0.01, tail_s=0.0, lone=2)
    return Session(
        request=request, engine=engine, team=Solo(), limits=quick, metrics=METRICS
    ).measure()


def hf_engine(request: ProfileRequest) -> Any:
    from energylens.profiler.hf import HfEngine
    from energylens.profiler.loader import Place, load

    place = Place(device="cpu")
    return HfEngine(request, load(request, place), place)


def test_the_loader_profiles_a_model_with_a_state_instead_of_a_cache(plugin: Any) -> None:
    pytest.importorskip("torch", reason="needs torch")
    pytest.importorskip("transformers", reason="needs transformers")
    plugin("mamba.py")
    request = ProfileRequest(model="mamba-2", batch=2, prompt_len=6, gen_len=3)
    found = measured(request, hf_engine(request))
    assert set(found.phases) == {"prefill", "decode", "request"}
    # 2 layers and sequences, 1536 channels: a window of 4 in bf16, and a state of 16 in fp32 (or
    # in bf16, as some versions keep it).
    channels = 2 * 2 * 1536
    assert found.memory.cache_bytes in (channels * (4 * 2 + 16 * 4), channels * (4 * 2 + 16 * 2))


def test_the_metric_counts_the_experts_of_a_step(plugin: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    plugin("experts.py")
    config = transformers.Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=8,
        num_experts_per_tok=2,
        vocab_size=100,
        architectures=["Qwen3MoeForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    request = ProfileRequest(
        model=str(tmp_path),
        phases=("decode",),
        size=False,
        batch=1,
        prompt_len=6,
        random_weights=True,
    )
    found = measured(request, hf_engine(request))
    assert found.metrics == {"experts_touched": 2, "experts": 8}  # one token, its top two


def test_the_meter_reads_what_the_register_counts(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 W of scripted register, with a wrap in the middle (B23)."""
    register, top = tmp_path / "energy_uj", 262_143_328_850
    (tmp_path / "max_energy_range_uj").write_text(str(top), encoding="utf-8")
    begin_s, first = time.monotonic(), top - 15_000_000
    register.write_text(str(first), encoding="utf-8")
    stop = threading.Event()

    def count() -> None:
        while not stop.wait(0.002):
            value = (first + int(50e6 * (time.monotonic() - begin_s))) % top
            fresh = tmp_path / "fresh"
            fresh.write_text(str(value), encoding="utf-8")
            fresh.replace(register)

    counting = threading.Thread(target=count, daemon=True)
    counting.start()
    try:
        monkeypatch.setenv("RAPL_ZONE", str(tmp_path))
        plugin("rapl.py")
        factory = METERS[-1]
        meter, infos = factory(())
        require_energy(meter, infos[0])
        with meter.recorder([i.uuid for i in infos]) as recorder:
            time.sleep(0.6)
            end_s = recorder.now()
            found = recorder.reading("rapl-0", end_s - 0.5, end_s)
    finally:
        stop.set()
        counting.join()
    assert found.method == "counter_slope"
    assert found.energy_j == pytest.approx(25, rel=0.1)
    assert found.scope == "module"
    (tmp_path / "max_energy_range_uj").unlink()  # B24: without it a wrap cannot be told
    with pytest.raises(MeterError, match="max_energy_range_uj: cannot be read"):
        meter.recorder([i.uuid for i in infos])
    with pytest.raises(MeterError, match="does not cover"):
        factory(("GPU-1",))
    register.unlink()
    with pytest.raises(MeterError, match="energy_uj: cannot be read"):
        factory(())
