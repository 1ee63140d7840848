"""Any bundle survives its file bit by bit; any damage to the file is noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energylens.cost.board import Spread
from energylens.cost.bundle import Bundle, HostLaw, Laws, dump_bundle, load_bundle
from energylens.cost.features import features
from energylens.cost.model import KernelModel, Published
from energylens.cost.regress import GaussianProcess
from energylens.errors import CalibrationError
from energylens.graph import Op, make_op
from energylens.results import BoardAnchor, HostAnchor
from energylens.spec.machines import load_device

H200 = load_device("h200")


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False, allow_infinity=False)


def adds(count: int) -> list[Op]:
    return [make_op("hf_add", rows=2.0**i, width=4096.0) for i in range(count)]


@st.composite
def kernel_models(draw: st.DrawFn) -> KernelModel:
    ops = adds(draw(st.integers(2, 6)))
    x = features(ops, H200)

    def process() -> GaussianProcess:
        def column(low: float, high: float, count: int) -> np.ndarray[Any, Any]:
            values = st.lists(numbers(low, high), min_size=count, max_size=count)
            return np.array(draw(values))

        return GaussianProcess(
            x=x,
            y=column(-1, 1, len(ops)),
            noise=column(0.003, 0.2, len(ops)),
            length=column(0.4, 60, x.shape[1]),
            signal=draw(numbers(0.01, 3)),
            mean=draw(numbers(-1, 1)),
        )

    return KernelModel(
        kernel="hf_add",
        latency=process(),
        power=process(),
        latency_rel_se=draw(numbers(0, 1)),
        power_rel_se=draw(numbers(0, 1)),
        measured=frozenset(o.key for o in ops[: draw(st.integers(0, len(ops)))]),
    )


anchors = st.builds(
    BoardAnchor,
    board_uuid=st.text("0123456789abcdef", min_size=10, max_size=10),
    device=st.just("h200"),
    idle_w=numbers(50, 150),
    stream_w=numbers(400, 690),
    gemm_tflops=numbers(100, 900),
    gemm_w=numbers(500, 700),
    gemm_mhz=st.none() | numbers(900, 1980),
    gemv_gbs=st.none() | numbers(1000, 4800),
)
laws = st.builds(
    Laws,
    eta=numbers(0.3, 2.5),
    compute_scale=numbers(0.5, 1.5),
    cap_fraction=numbers(0.9, 1.0),
    gap_s=numbers(0, 2e-6),
    link_w=numbers(0, 60),
)
hosts = st.builds(
    HostLaw,
    launch_s=st.dictionaries(st.sampled_from((1, 2, 4, 8)), numbers(1e-6, 1e-4), min_size=1),
    wait_w=st.dictionaries(st.sampled_from((1, 2, 4, 8)), numbers(0, 60)),
    anchor=st.builds(HostAnchor, launch_us=numbers(1, 50), module_us=st.none() | numbers(1, 9000)),
    rel_se=numbers(0.01, 1),
)
published = st.builds(
    lambda t: Published(workers=(2, 4), values=(1.0, 8.0), latency_s={"all_reduce": np.array(t)}),
    st.lists(
        st.lists(numbers(1e-6, 1e-2), min_size=2, max_size=2), min_size=2, max_size=2
    ),
)  # fmt: skip
bundles = st.builds(
    Bundle,
    device=st.just("h200"),
    provider=st.sampled_from(("torch", "vllm")),
    version=st.text("0123456789-.", min_size=1, max_size=12),
    power_limit_w=numbers(100, 1000),
    boards=st.lists(anchors, max_size=3).map(tuple),
    typical=anchors,
    spread=st.builds(
        Spread,
        memory_power=numbers(0, 1),
        compute_power=numbers(0, 1),
        memory_time=numbers(0, 1),
        idle_w=numbers(0, 20),
    ),
    kernels=kernel_models().map(lambda k: {"hf_add": k}),
    laws=laws,
    host=st.none() | hosts,
    published=st.none() | published,
    versions=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
    facts=st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=2),
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bundles") / "bundle.json"


def reload(path: Path, text: str) -> Bundle:
    path.write_text(text, encoding="utf-8")
    return load_bundle(path)


@given(bundle=bundles)
@settings(max_examples=40)
def test_a_loaded_bundle_is_saved_as_the_same_bytes_and_predicts_the_same_bits(
    bundle: Bundle, path: Path
):
    first = reload(path, dump_bundle(bundle))
    text = dump_bundle(first)
    assert text == path.read_text(encoding="utf-8")
    second = reload(path, text)
    assert first.sha256 == second.sha256
    ops = [*adds(7), make_op("hf_add", rows=100, width=9999)]
    assert first.model(H200).costs(ops) == second.model(H200).costs(ops)


@given(bundle=bundles)
@settings(max_examples=40)
def test_a_bundle_reads_back_as_it_was_written(bundle: Bundle, path: Path):
    again = reload(path, dump_bundle(bundle))
    for name in ("device", "provider", "version", "power_limit_w", "boards", "typical", "spread",
                 "laws", "host", "versions", "facts"):  # fmt: skip
        assert getattr(again, name) == getattr(bundle, name), name
    assert (again.published is None) == (bundle.published is None)
    kept, was = again.kernels["hf_add"], bundle.kernels["hf_add"]
    assert kept.measured == was.measured
    # Numbers of the regressors are kept to seven digits.
    np.testing.assert_allclose(kept.latency.y, was.latency.y, rtol=1e-6, atol=1e-300)


@given(bundle=bundles, data=st.data())
@settings(max_examples=60)
def test_a_cut_file_is_refused(bundle: Bundle, data: st.DataObject, path: Path):
    text = dump_bundle(bundle)
    length = data.draw(st.integers(0, len(text.rstrip()) - 1))
    with pytest.raises(CalibrationError):
        reload(path, text[:length])


@given(bundle=bundles, data=st.data())
@settings(max_examples=150)
def test_a_changed_character_is_refused_unless_it_means_the_same(
    bundle: Bundle, data: st.DataObject, path: Path
):
    text = dump_bundle(bundle)
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from('0123456789eE.-+,:[]{}" naNx\\'))
    changed = text[:at] + other + text[at + 1 :]
    try:
        same = json.loads(changed) == json.loads(text)
    except ValueError:
        same = False
    if same:
        assert reload(path, changed).sha256 == reload(path, text).sha256
    else:
        with pytest.raises(CalibrationError):
            reload(path, changed)
