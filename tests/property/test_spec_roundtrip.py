from __future__ import annotations

from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energylens.errors import SpecError
from energylens.spec.einsum import parse_accesses, parse_einsum
from energylens.spec.load import OPS, dump_spec, load_spec, parse_spec
from energylens.spec.model import (
    Access,
    Block,
    Einsum,
    Entry,
    Fusion,
    Overlap,
    Precision,
    Spec,
)
from energylens.spec.resources import data_dir, list_resources
from energylens.units import BITS

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
texts = st.one_of(names, st.sampled_from(["1e9", "null", "on", "2024-01-01", "a: b", "# é"]))
SIZED = ("m", "g", "f", "e")
precisions = st.sampled_from(sorted(BITS))


@st.composite
def accesses(draw: st.DrawFn) -> Access:
    tensor = draw(names)
    allowed = SIZED if tensor.startswith("W") else (*SIZED, "b", "s", "t")
    ranks = st.lists(st.sampled_from(allowed), min_size=1, max_size=5, unique=True)
    return Access(tensor=tensor, ranks=tuple(draw(ranks)))


@st.composite
def einsums(draw: st.DrawFn) -> Einsum:
    inputs = tuple(draw(st.lists(accesses(), min_size=1, max_size=3)))
    known = sorted({r for a in inputs for r in a.ranks})
    output = draw(st.lists(st.sampled_from(known), min_size=1, unique=True))
    return Einsum(inputs=inputs, output=Access(tensor=draw(names), ranks=tuple(output)))


@st.composite
def entries(draw: st.DrawFn, name: str) -> Entry:
    if draw(st.booleans()):
        inputs = tuple(draw(st.lists(accesses(), min_size=1, max_size=2)))
        op = draw(st.sampled_from(OPS))
        stored = op == "embedding" and any(a.is_weight for a in inputs)
        return Entry(name=name, op=op, inputs=inputs, weights=draw(precisions) if stored else None)
    einsum = draw(einsums())
    has_weight = any(a.is_weight for a in einsum.inputs)
    return Entry(
        name=name,
        einsum=einsum,
        mask=draw(st.sampled_from([None, "causal"])),
        cache=draw(st.booleans()),
        bias=has_weight and draw(st.booleans()),
        weights=draw(st.none() | precisions) if has_weight else None,
    )


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    blocks = []
    for name in draw(st.lists(texts, min_size=1, max_size=3, unique=True)):
        members = draw(st.lists(texts, min_size=2, max_size=4, unique=True))
        cascade = tuple(draw(entries(member)) for member in members)
        has_mask = any(entry.mask for entry in cascade)
        window = draw(st.none() | st.integers(1, 4096)) if has_mask else None
        repeat = draw(st.integers(1, 99))
        blocks.append(Block(name=name, cascade=cascade, repeat=repeat, window=window))
    first = tuple(entry.name for entry in blocks[0].cascade)
    sizes = {rank: draw(st.integers(1, 10**6)) for rank in SIZED}
    routing: dict[str, object] = draw(
        st.sampled_from([{"kind": "uniform"}, {"kind": "zipf", "alpha": 1e-7}])
    )
    moe = MappingProxyType({"rank": "e", "topk": 1, "routing": MappingProxyType(routing)})
    split = st.lists(st.sampled_from(SIZED), unique=True).map(tuple)
    return Spec(
        name=draw(texts),
        source=draw(texts),
        ranks=MappingProxyType(sizes),
        blocks=tuple(blocks),
        precision=Precision(weights=draw(precisions), kv_cache=draw(precisions)),
        parallelism=MappingProxyType(draw(st.dictionaries(st.sampled_from(["tp", "ep"]), split))),
        fusion=draw(
            st.sampled_from([(), (Fusion(members=first),), (Fusion(members=first, kernel="k"),)])
        ),
        overlap=draw(
            st.sampled_from(
                [
                    (),
                    (Overlap(collective=first[0], beside=first[1], sm=3, chunks=2),),
                    (Overlap(collective=first[1], beside="_".join(first[:2]), sm=1),),
                ]
            )
        ),
        moe=draw(st.sampled_from([None, moe])),
        notes=tuple(draw(st.lists(texts, max_size=2))),
    )


@given(einsums())
def test_a_contraction_survives_its_text(einsum: Einsum) -> None:
    assert parse_einsum(str(einsum)) == einsum


@given(st.lists(accesses(), min_size=1, max_size=3).map(tuple))
def test_accesses_survive_their_text(read: tuple[Access, ...]) -> None:
    assert parse_accesses(", ".join(map(str, read))) == read


@given(st.text(alphabet="xW[],->_ 9\n*", max_size=20))
def test_any_text_is_a_contraction_or_a_spec_error_in_one_line(text: str) -> None:
    try:
        parse_einsum(text)
    except SpecError as error:
        assert "\n" not in str(error)


@given(specs())
def test_a_spec_survives_yaml(spec: Spec) -> None:
    assert parse_spec(dump_spec(spec)) == spec


@pytest.mark.parametrize("name", list_resources("specs"))
def test_a_shipped_spec_survives_yaml(name: str) -> None:
    spec = load_spec(name)
    text = dump_spec(spec)
    assert parse_spec(text) == spec
    assert dump_spec(parse_spec(text)) == text


@given(st.data())
def test_a_damaged_file_loads_or_is_a_spec_error_in_one_line(data: st.DataObject) -> None:
    text = (data_dir("specs") / "llama3_8b.yaml").read_text()
    at = data.draw(st.integers(0, len(text)))
    upto = data.draw(st.integers(at, min(len(text), at + 12)))
    junk = data.draw(st.text(alphabet="[]{}:,-> \n\t'\"0.eW!&*#é\x07", max_size=4))
    try:
        parse_spec(text[:at] + junk + text[upto:], path="damaged.yaml")
    except SpecError as error:
        assert str(error).startswith("damaged.yaml")
        assert "\n" not in str(error)
