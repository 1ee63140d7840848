from __future__ import annotations

import pytest

from energylens.errors import SpecError
from energylens.spec.einsum import parse_accesses, parse_einsum
from energylens.spec.model import Access, Einsum


def test_a_contraction_is_read_as_written() -> None:
    assert parse_einsum("x[b,s,m], Wq[m,g,r,d] -> q[b,s,g,r,d]") == Einsum(
        inputs=(
            Access(tensor="x", ranks=("b", "s", "m")),
            Access(tensor="Wq", ranks=("m", "g", "r", "d")),
        ),
        output=Access(tensor="q", ranks=("b", "s", "g", "r", "d")),
    )


def test_blanks_do_not_matter_and_str_is_the_normal_form() -> None:
    assert str(parse_einsum(" x [ b,s , m ],Wq[m,d]->q[b,s,d] ")) == "x[b,s,m], Wq[m,d] -> q[b,s,d]"


def test_only_the_ranks_that_the_output_lacks_are_reduced() -> None:
    assert parse_einsum("c[b,s,g,r,d], Wo[g,r,d,m] -> y[b,s,m]").reduced == ("g", "r", "d")


def test_a_named_op_reads_a_list_of_accesses() -> None:
    accesses = parse_accesses("q[b,s,g,r,d], Wq_norm[d]")
    assert [a.tensor for a in accesses] == ["q", "Wq_norm"]
    assert [a.is_weight for a in accesses] == [False, True]


@pytest.mark.parametrize(
    ("text", "character", "expected", "found"),
    [
        ("", 1, "a tensor's name", "the end"),
        ("x[b,s", 6, ", or ]", "the end"),
        ("x[b s] -> y[b]", 5, ", or ]", "s"),
        ("x[] -> y[b]", 3, "a rank's name", "]"),
        ("x[b,] -> y[b]", 5, "a rank's name", "]"),
        ("x b] -> y[b]", 3, "[", "b"),
        ("x[b,b] -> y[b]", 5, "each rank of x once", "b again"),
        ("x[b] - y[b]", 6, "a name or one of [ ] , ->", "'-'"),
        ("x[b] * y[b]", 6, "a name or one of [ ] , ->", "'*'"),
        ("x[b]", 5, ", or ->", "the end"),
        ("x[b] ->", 8, "a tensor's name", "the end"),
        ("x[b] -> y[b], z[b]", 13, "the end", ","),
        ("x[b], y[c] -> z[b,q]", 15, "only ranks of the inputs (b, c) in z", "q"),
    ],
)
def test_a_bad_contraction_names_expression_and_position(
    text: str, character: int, expected: str, found: str
) -> None:
    with pytest.raises(SpecError) as caught:
        parse_einsum(text)
    assert (
        str(caught.value) == f"{text!r}, character {character}: expected {expected}, found {found}"
    )


def test_accesses_hold_no_arrow() -> None:
    with pytest.raises(SpecError, match="character 6: expected , or the end, found ->"):
        parse_accesses("x[b] -> y[b]")
