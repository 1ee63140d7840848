"""The Pareto front of a model's deployments: score all of them fast, predict the front exactly.

The first stage (`layout`) prices every configuration from steps that `Machine.price` prices
exactly: for an engine that serves, the ends of cells of the batch (what runs as one captured graph,
or takes the same tiles of a matrix kernel) at a few contexts, and lines between them; for any other
engine, each batch. The second stage (`search`) predicts, with intervals, what the first one puts on
the front or within `TABLE_ERROR` of it. The front, the best and the ranks (`front`) then come from
the best numbers known.
"""

from energylens.explore.front import OBJECTIVES, TABLE_ERROR, pareto
from energylens.explore.prices import Prices
from energylens.explore.search import DEFAULT_OBJECTIVES, Constraints, SearchSpace, explore

__all__ = [
    "DEFAULT_OBJECTIVES",
    "OBJECTIVES",
    "TABLE_ERROR",
    "Constraints",
    "Prices",
    "SearchSpace",
    "explore",
    "pareto",
]
