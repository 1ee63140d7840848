"""YAML as fields that know their place: each reads itself as a type, or says what is wrong."""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import yaml

from energylens.errors import SpecError

try:
    from yaml import CSafeLoader as _SafeLoader
except ImportError:  # PyYAML built without libyaml
    from yaml import SafeLoader as _SafeLoader  # type: ignore[assignment]

_T = TypeVar("_T")

_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")
_FLOAT_START = list("-+.0123456789")


class _Loader(_SafeLoader):
    """Safe YAML that reads 4.8e12 as a number, as YAML 1.2 does, and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value!r} is given twice; keep one", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, _FLOAT_START)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, _FLOAT_START)


def parse_yaml(text: str, file: str) -> Field:
    """The whole of a YAML text as one field; ``file`` names it in messages.

    Raises:
        SpecError: the text is no YAML; the message holds the line.
    """
    try:
        # A subclass of the safe loader: no tag can make a Python object.
        return Field(yaml.load(text, Loader=_Loader), "", file)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = " ".join(filter(None, (error.context, error.problem)))
        raise SpecError(f"{file}{line}: broken YAML: {' '.join(problem.split())}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or a number that is none
        raise SpecError(f"{file}: broken YAML: {' '.join(str(error).split())}") from error


def dump_yaml(document: dict[str, Any]) -> str:
    """The document as YAML, in the order of its keys."""
    return yaml.dump(
        document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None
    )


@dataclass(frozen=True, slots=True)
class Field:
    """A value of a YAML file and its place there; reads itself as a type, or fails with both."""

    value: Any
    path: str
    file: str

    def error(self, problem: str) -> SpecError:
        """The error to raise about this field."""
        return SpecError(f"{self.file}: {self.path or 'top level'}: {problem}")

    def expected(self, allowed: str) -> SpecError:
        """The error to raise where the value is not one of those allowed."""
        found = "nothing" if self.value is None else reprlib.repr(self.value)
        return self.error(f"found {found}; allowed: {allowed}")

    def pairs(self) -> dict[str, Field]:
        """A mapping with free keys."""
        if not isinstance(self.value, dict):
            raise self.expected("a mapping (key: value)")
        fields = {}
        for key, value in self.value.items():
            if not isinstance(key, str):
                raise self.error(f"found the key {key!r}; allowed: text (put it in quotes)")
            fields[key] = Field(value, f"{self.path}.{key}" if self.path else key, self.file)
        return fields

    def mapping(self, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Field]:
        """A mapping with these keys; an optional one without a value counts as absent."""
        fields = self.pairs()
        allowed = (*required, *optional)
        for key in fields:
            if key not in allowed:
                raise self.error(
                    f"unknown key {key!r}{near(key, allowed)}; allowed: {', '.join(allowed)}"
                )
        for key in required:
            if key not in fields:
                raise self.error(f"key {key!r} is missing; required: {', '.join(required)}")
        return {k: f for k, f in fields.items() if k in required or f.value is not None}

    def items(self, minimum: int = 0) -> list[Field]:
        """A list."""
        if not isinstance(self.value, list) or len(self.value) < minimum:
            raise self.expected(f"a list with at least {minimum} items" if minimum else "a list")
        return [Field(v, f"{self.path}[{i}]", self.file) for i, v in enumerate(self.value)]

    def text(self) -> str:
        """Text that is not empty."""
        if not isinstance(self.value, str) or not self.value.strip():
            raise self.expected("text")
        return self.value

    def parsed(self, parse: Callable[[str], _T]) -> _T:
        """Text that means something to a parser, which does not know where the text stands."""
        text = self.text()
        try:
            return parse(text)
        except SpecError as error:
            raise self.error(str(error)) from error

    def texts(self) -> tuple[str, ...]:
        """A list of texts."""
        return tuple(item.text() for item in self.items())

    def choice(self, allowed: Iterable[str]) -> str:
        """One of the texts allowed."""
        allowed = tuple(allowed)
        if not isinstance(self.value, str) or self.value not in allowed:
            hint = near(self.value, allowed) if isinstance(self.value, str) else ""
            raise self.expected(", ".join(allowed) + hint)
        return self.value

    def choices(self, allowed: Iterable[str]) -> tuple[str, ...]:
        """A list of the texts allowed, each once."""
        allowed = tuple(allowed)
        found = tuple(item.choice(allowed) for item in self.items())
        if again := twice(found):
            raise self.error(f"{again!r} occurs twice; use each once")
        return found

    def integer(self) -> int:
        """A whole number of at least 1."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or self.value < 1:
            raise self.expected("a whole number of at least 1")
        return self.value

    def number(self) -> float:
        """A number above 0."""
        is_number = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        if not is_number or not math.isfinite(self.value) or self.value <= 0:
            raise self.expected("a number above 0")
        return float(self.value)

    def flag(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            raise self.expected("true, false")
        return self.value


def near(name: str, known: Iterable[str]) -> str:
    """A hint at the known names that look like ``name``; empty where none does."""
    names = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(names)}?)" if names else ""


def twice(names: Iterable[str]) -> str | None:
    """The first name that occurs more than once."""
    return next((name for name, count in Counter(names).items() if count > 1), None)
