"""Published latencies that a bundle carries for what was not measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from energylens.cost.model import Published

if TYPE_CHECKING:
    import pandas as pd


def load_published(path: Path, device: str) -> Published | None:
    """Published collective latencies: of the newest NCCL version that has all worker counts.

    Args:
        path: CSV with the columns device, nccl_version, collective, workers, values, latency_s.
        device: name of the device.

    Returns:
        None where the table has none of the device.
    """
    import pandas as pd

    table = pd.read_csv(path, dtype={"nccl_version": str})
    table = table[table["device"] == device]
    if table.empty:
        return None
    complete = table.groupby("nccl_version")["workers"].nunique()
    best = complete[complete == complete.max()].index
    newest = max(best, key=lambda v: tuple(map(int, v.split("."))))
    return _published(table[table["nccl_version"] == newest])


def load_one_shot(path: Path) -> Published:
    """Published latencies of an all-reduce by one kernel over NVLink.

    Args:
        path: CSV with the columns device, collective, workers, values, latency_s.
    """
    import pandas as pd

    return _published(pd.read_csv(path))


def _published(table: pd.DataFrame) -> Published:
    wide = table.pivot_table(
        index=["collective", "workers"], columns="values", values="latency_s", aggfunc="median"
    ).dropna(axis=1)
    return Published(
        workers=tuple(int(n) for n in sorted(set(wide.index.get_level_values("workers")))),
        values=tuple(float(v) for v in wide.columns),
        latency_s={
            str(name): wide.loc[name].sort_index().to_numpy(dtype=np.float64)
            for name in sorted(set(wide.index.get_level_values("collective")))
        },
    )
