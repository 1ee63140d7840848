"""EnergyLens predicts the joules and seconds of LLM inference before anything is deployed.

The command line is `energylens`; as a library, `energylens.predict`, `energylens.explore`,
`energylens.advise` and `energylens.validate` are its verbs (`energylens.api`). Importing this
package imports none of the heavy libraries.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from energylens.api import advise as advise
    from energylens.api import explore as explore
    from energylens.api import predict as predict
    from energylens.api import validate as validate

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())

_VERBS = ("explore", "predict", "validate")
"""Names of functions of `energylens.api` that are names of modules, too."""


class _Verb(ModuleType):
    """A module that can be called: it is the function of its name, and its own names stay."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(import_module("energylens.api"), self.__name__.rpartition(".")[2])(
            *args, **kwargs
        )


class _Package(ModuleType):
    """This package: a verb's module is imported when it is first named, and can be called."""

    def __getattr__(self, name: str) -> Any:
        if name == "advise":  # no module has that name
            return import_module(f"{self.__name__}.api").advise
        if name not in _VERBS:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return import_module(f"{self.__name__}.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system hands every imported submodule over here.
        if name in _VERBS and type(value) is ModuleType:
            value.__class__ = _Verb
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
