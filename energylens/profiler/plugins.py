"""Loaders, metrics and meters of one's own, from a module or a file.

A plugin changes the lists `energylens.profiler.LOADERS`, ``METRICS`` and ``METERS`` when it is
imported; every worker imports it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

from energylens.errors import SpecError


def load_plugins(names: Iterable[str]) -> None:
    """Import each plugin once.

    Args:
        names: files that end in ``.py``, or modules.

    Raises:
        SpecError: there is no such file or module.
    """
    for name in names:
        if not name.endswith(".py"):
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                raise SpecError(f"--plugin {name}: {error}; give a module or a .py file") from None
            continue
        path = Path(name)
        if not path.is_file():
            raise SpecError(f"--plugin {name}: no such file")
        module_name = f"energylens_plugin_{path.stem}"
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        if module_name not in sys.modules:
            sys.modules[module_name] = module
            spec.loader.exec_module(module)
