"""Expressions of the spec language: ``x[b,s,m], Wq[m,g,r,d] -> q[b,s,g,r,d]``.

Grammar::

    einsum   = accesses "->" access
    accesses = access ("," access)*
    access   = name "[" name ("," name)* "]"

Blanks are free. ``str`` of a parsed value is its normal form and parses to an equal value.
"""

from __future__ import annotations

import re

from energylens.errors import SpecError
from energylens.spec.model import Access, Einsum

_TOKEN = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*|->|[\[\],])")
_END = "the end"


class _Reader:
    """Tokens of one expression, taken from left to right: names, marks, and at last `_END`."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, int]] = []
        at, length = 0, len(text.rstrip())
        while at < length:
            match = _TOKEN.match(text, at)
            if match is None:
                wrong = length - len(text[at:length].lstrip())
                raise self.error(wrong, "a name or one of [ ] , ->", repr(text[wrong]))
            self._tokens.append((match[1], match.start(1)))
            at = match.end()
        self._tokens.append((_END, length))
        self._next = 0

    @property
    def position(self) -> int:
        """Offset of the next token in the text."""
        return self._tokens[self._next][1]

    def error(self, position: int, expected: str, found: str) -> SpecError:
        """The error to raise about an offset; its text counts characters from 1."""
        return SpecError(
            f"{self._text!r}, character {position + 1}: expected {expected}, found {found}"
        )

    def name(self, what: str) -> str:
        """Take a name."""
        token, position = self._tokens[self._next]
        if not token.isidentifier():
            raise self.error(position, what, token)
        self._next += 1
        return token

    def mark(self, *allowed: str) -> str:
        """Take one of these marks; `_END` is a mark, which is never used up."""
        token, position = self._tokens[self._next]
        if token not in allowed:
            raise self.error(position, " or ".join(allowed), token)
        self._next += token != _END
        return token


def _access(reader: _Reader) -> Access:
    tensor = reader.name("a tensor's name")
    reader.mark("[")
    ranks: list[str] = []
    mark = ","
    while mark == ",":
        position = reader.position
        rank = reader.name("a rank's name")
        if rank in ranks:
            raise reader.error(position, f"each rank of {tensor} once", f"{rank} again")
        ranks.append(rank)
        mark = reader.mark(",", "]")
    return Access(tensor=tensor, ranks=tuple(ranks))


def _accesses(reader: _Reader, end: str) -> tuple[Access, ...]:
    accesses = [_access(reader)]
    while reader.mark(",", end) == ",":
        accesses.append(_access(reader))
    return tuple(accesses)


def parse_einsum(text: str) -> Einsum:
    """Parse a contraction, e.g. ``"x[b,s,m], Wq[m,g,r,d] -> q[b,s,g,r,d]"``.

    Raises:
        SpecError: the text is no contraction; the message holds the text and the position.
    """
    reader = _Reader(text)
    inputs = _accesses(reader, "->")
    position = reader.position
    output = _access(reader)
    reader.mark(_END)
    known = dict.fromkeys(r for a in inputs for r in a.ranks)
    for rank in output.ranks:
        if rank not in known:
            expected = f"only ranks of the inputs ({', '.join(known)}) in {output.tensor}"
            raise reader.error(position, expected, rank)
    return Einsum(inputs=inputs, output=output)


def parse_accesses(text: str) -> tuple[Access, ...]:
    """Parse what a named op reads, e.g. ``"q[b,s,g,r,d], k[b,s,g,d]"``.

    Raises:
        SpecError: the text is no list of accesses; the message holds the text and the position.
    """
    return _accesses(_Reader(text), _END)
