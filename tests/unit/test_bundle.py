"""The bundle file: shipped, checked on loading, and never code."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import energylens
from energylens.cli import main
from energylens.cost.bundle import dump_bundle, load_bundle, select
from energylens.errors import CalibrationError
from energylens.graph import KERNELS, make_op
from energylens.predict import Catalogue
from energylens.results import Source
from energylens.spec.machines import load_device, load_engine
from energylens.spec.resources import data_dir

SHIPPED = data_dir("calibration") / "bundles" / "h200" / "torch.json"
H200 = load_device("h200")
OPS = [
    make_op("gemm", m=16, n=4096, k=4096),
    make_op("gemm", m=777, n=5000, k=3000),
    make_op("hf_rmsnorm", rows=3, width=4096),
    make_op(
        "attention_decode", batch=4, new=1, context=1000.5, q_heads=32, kv_heads=8, head_dim=128
    ),
    make_op("all_reduce", values=8192, workers=2),
    make_op("all_reduce", values=8192, workers=8),
]


@pytest.fixture(scope="module")
def shipped():
    return load_bundle(SHIPPED)


def test_the_shipped_bundle_names_what_it_stands_for(shipped):
    assert (shipped.device, shipped.provider) == ("h200", "torch")
    assert shipped.power_limit_w == 700.0
    assert len(shipped.boards) == 13
    assert len({b.board_uuid for b in shipped.boards}) == 13
    assert shipped.ref.sha256 == shipped.sha256


def test_boards_of_the_shipped_bundle_are_typical_on_average(shipped):
    idle = [b.idle_w for b in shipped.boards]
    assert min(idle) < shipped.typical.idle_w < max(idle)


def test_only_hashes_of_boards_are_shipped(shipped):
    assert all(len(b.board_uuid) == 10 for b in shipped.boards)


def test_the_catalogue_finds_the_shipped_bundle():
    catalogue = Catalogue()
    assert "h200/torch" in catalogue.list("bundles")
    found = select(catalogue.bundles(H200, catalogue.engine("hf")), "h200", "torch")
    assert found.device == "h200"


def test_shipped_laws_are_physical(shipped):
    laws = shipped.laws
    assert 0.3 < laws.eta < 2.5
    assert 0.9 < laws.cap_fraction <= 1.01
    assert 0 <= laws.gap_s < 2e-6
    assert 0 < laws.latency_sd < 0.1
    assert 0 < laws.energy_sd < 0.1
    assert shipped.host is not None
    # Tensor-parallel hooks cost the host time (DESIGN law 2).
    assert 5e-6 < shipped.host.launch_s[1] < shipped.host.launch_s[2] < 200e-6


def test_every_calibrated_op_is_priced_as_measured(shipped):
    model = shipped.model(H200)
    for kernel in shipped.kernels.values():
        ops = [make_op(n, dtype=d, **_sizes(n, s)) for n, s, d in sorted(kernel.measured)]
        for op, cost in zip(ops, model.costs(ops), strict=True):
            assert cost.source is Source.MEASURED, op
            assert cost.latency_s > 0
            assert cost.energy_j > 0


def _sizes(kernel: str, shape: tuple[float, ...]) -> dict[str, float]:
    return dict(zip(KERNELS[kernel].dims, shape, strict=True))


def test_saving_and_loading_changes_no_bit(shipped, tmp_path: Path):
    path = tmp_path / "again.json"
    path.write_text(dump_bundle(shipped), encoding="utf-8")
    again = load_bundle(path)
    assert path.read_bytes() == SHIPPED.read_bytes()
    assert again.sha256 == shipped.sha256
    assert again.model(H200).costs(OPS) == shipped.model(H200).costs(OPS)
    assert (again.laws, again.spread, again.host) == (shipped.laws, shipped.spread, shipped.host)


def test_the_hash_is_that_of_the_content_not_of_the_file(tmp_path: Path):
    document = json.loads(SHIPPED.read_text(encoding="utf-8"))
    claimed = document.pop("sha256")
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == claimed
    path = tmp_path / "pretty.json"
    path.write_text(json.dumps({"sha256": claimed, **document}, indent=2), encoding="utf-8")
    assert load_bundle(path).sha256 == claimed


# ---------------------------------------------------------------- vLLM's


@pytest.fixture(scope="module")
def vllm():
    return load_bundle(SHIPPED.with_name("vllm.json"))


def test_vllms_bundle_holds_its_kernels_its_hosts_and_collectives(vllm):
    assert (vllm.device, vllm.provider) == ("h200", "vllm")
    named = {k.kernel for k in load_engine("vllm").kernels.values()}
    collectives = {name for name, k in KERNELS.items() if k.is_collective}
    assert set(vllm.kernels) <= named | collectives
    computed = {n for n in named if not KERNELS[n].is_collective and "moe" not in n}
    assert {n for n in computed if not re.search("bmm|latent|window", n)} <= set(vllm.kernels)
    assert "vllm" in vllm.versions
    # The boards of the torch runs that it stands on, and its own.
    assert len(vllm.boards) > len(load_bundle(SHIPPED).boards)


def test_vllms_host_times_are_physical(vllm):
    assert vllm.host is not None
    assert dict(vllm.host.launch_s) == {}
    for steps in (vllm.host.steps[1], vllm.host.lone_steps[1]):
        assert 0.5e-3 < steps.step_s < 20e-3
        assert 0 <= steps.sequence_s < 1e-3
        assert 0 <= steps.token_s < 20e-6
        assert 0 <= steps.layer_s < 1e-3
        assert 0 <= steps.serial_share <= 1
    # More of the host's work hides behind the step before than behind nothing.
    assert vllm.host.steps[1].serial_share < vllm.host.lone_steps[1].serial_share


def test_saving_and_loading_vllms_bundle_changes_no_bit(vllm, tmp_path: Path):
    path = tmp_path / "again.json"
    path.write_text(dump_bundle(vllm), encoding="utf-8")
    again = load_bundle(path)
    assert path.read_bytes() == SHIPPED.with_name("vllm.json").read_bytes()
    assert (again.laws, again.spread, again.host) == (vllm.laws, vllm.spread, vllm.host)


# ---------------------------------------------------------------- damage


def rehashed(change: Callable[[dict[str, Any]], None]) -> str:
    document = json.loads(SHIPPED.read_text(encoding="utf-8"))
    del document["sha256"]
    change(document)
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return json.dumps({**document, "sha256": hashlib.sha256(text.encode()).hexdigest()})


def shipped_text() -> str:
    return SHIPPED.read_text(encoding="utf-8")


def changed_digit() -> str:
    text = shipped_text()
    at = text.index('"eta":') + 8
    assert text[at].isdigit()
    return text[:at] + ("1" if text[at] != "1" else "2") + text[at + 1 :]


def not_a_number() -> str:
    text = shipped_text()
    start = text.index('"eta":') + 6
    return text[:start] + "NaN" + text[text.index(",", start) :]


def too_large() -> str:
    text = shipped_text()
    start = text.index('"eta":') + 6
    return text[:start] + "1e999" + text[text.index(",", start) :]


DAMAGED = {
    "truncated": lambda: shipped_text()[:-1000],
    "empty": lambda: "",
    "changed digit": changed_digit,
    "not a number": not_a_number,
    "too large": too_large,
    "wrong schema": lambda: rehashed(lambda d: d.update(schema="energylens/bundle/v2")),
    "no schema": lambda: rehashed(lambda d: d.pop("schema")),
    "no hash": lambda: json.dumps(
        {k: v for k, v in json.loads(shipped_text()).items() if k != "sha256"}
    ),
    "another document": lambda: "[1, 2]",
    "a missing field": lambda: rehashed(lambda d: d.pop("laws")),
    "an unknown field": lambda: rehashed(lambda d: d["laws"].update(future=1.0)),
    "a kernel cut short": lambda: rehashed(lambda d: d["kernels"]["gemm"].pop("x")),
    "kernels that are a list": lambda: rehashed(lambda d: d.update(kernels=[])),
    "boards that are text": lambda: rehashed(lambda d: d.update(boards="six")),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_bundle_is_refused_by_its_path(damage: str, tmp_path: Path):
    path = tmp_path / "bundle.json"
    path.write_text(DAMAGED[damage](), encoding="utf-8")
    with pytest.raises(CalibrationError) as error:
        load_bundle(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path):
    path = tmp_path / "bundle.json"
    path.write_bytes(b"\x80\x04\x95\xff")  # how a pickle starts
    with pytest.raises(CalibrationError, match="not a bundle"):
        load_bundle(path)


def test_a_missing_bundle_is_named(tmp_path: Path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(CalibrationError) as error:
            load_bundle(path)
        assert str(error.value).startswith(f"{path}: ")


@pytest.mark.parametrize("damage", ["truncated", "changed digit", "too large", "wrong schema"])
def test_the_command_line_exits_with_2(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_debug: None
):
    path = tmp_path / "bundle.json"
    path.write_text(DAMAGED[damage](), encoding="utf-8")
    assert main(["predict", "llama3_8b", "--engine", "hf", "--bundle", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert str(path) in err


# ---------------------------------------------------------------- choice and form


def test_the_newest_bundle_of_device_and_provider_is_chosen(shipped):
    from dataclasses import replace

    old, new = (replace(shipped, version=v) for v in ("2024-12-31", "2025-01-01"))
    assert select([new, old], "h200", "torch") is new
    assert select([old, new], "h200", "torch") is new
    assert select([old, new], "h200", "vllm") is None
    assert select([old, new], "a6000", "torch") is None
    assert select([], "h200", "torch") is None


def test_nothing_is_ever_unpickled():
    package = Path(energylens.__file__).parent
    unsafe = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    for source in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
                if {a.name for a in node.names} <= {"Parallel", "delayed", "parallel_config"}:
                    names = []  # joblib's workers, not its files
            elif isinstance(node, ast.keyword):
                names = ["pickle"] if node.arg == "allow_pickle" else []
            assert not unsafe & {n.split(".")[0] for n in names}, source
