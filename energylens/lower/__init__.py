"""A model on an engine: the kernels that a worker executes in a step, and what it holds in memory.

`lower` decides everything that does not depend on the step (how ranks are split, which entries are
one kernel, which collectives follow); `Lowered.ops` then sizes the kernels for one step.
`lower_step` does both.
"""

from energylens.lower.kernels import Lowered, lower, lower_step
from energylens.lower.memory import cache_bytes, memory, parameters
from energylens.lower.shard import valid_tp

__all__ = ["Lowered", "cache_bytes", "lower", "lower_step", "memory", "parameters", "valid_tp"]
