"""A model on an engine: the kernels that a worker executes in a step, and what it holds in memory.

`lower` decides everything that does not depend on the step (how ranks are split, which entries are
one kernel, which collectives follow); `Lowered.ops` then sizes the kernels for one step.
`lower_step` does both, `lower_stages` the first part for each stage of a pipeline.
"""

from energylens.lower.items import Experts
from energylens.lower.kernels import Lowered, lower, lower_step
from energylens.lower.memory import cache_bytes, fullest, memory, parameters
from energylens.lower.shard import valid_tp
from energylens.lower.stages import lower_stages, staged

__all__ = [
    "Experts",
    "Lowered",
    "cache_bytes",
    "fullest",
    "lower",
    "lower_stages",
    "lower_step",
    "memory",
    "parameters",
    "staged",
    "valid_tp",
]
