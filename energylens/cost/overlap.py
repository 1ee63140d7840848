"""Collectives beside compute: what of them a GEMM in chunks hides (DESIGN law 7).

Each chunk of a GEMM is followed by the all-reduce of its result, while the next chunk is computed::

    GEMM        | 1 | 2 | 3 | 4 |
    all-reduce          | 1 | 2 | 3 | 4 |

A kernel keeps its streaming multiprocessors (SMs) until it is done, and the next chunk is queued
before the all-reduce of the one before can start: that one gets its SMs when the GEMM gives them
up, unless the tiles of a chunk leave enough of them free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

_TILE = (128, 256)  # rows and columns of the largest tile that one SM computes
_CAPPED_CLOCK = 0.75  # over the maximum: about where a board at its power cap settles
_SLOWEST = 0.05  # rate of what hardly gets on beside the other

NCCL_SMS: Mapping[tuple[str, int], int] = MappingProxyType({("h200", 2): 24})
"""Device and workers -> SMs that NCCL takes where nobody asks for a number.

A communicator that is only allowed more takes no more either. As NCCL itself says with
``NCCL_DEBUG=INFO``: "24 coll channels".
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapLaw:
    """How a GEMM and a collective beside it hold each other up; fitted on overlaps.

    Attributes:
        late: chunks by which the collective lags behind where no SMs are left free.
        slow_gemm, slow_sms: of its speed, what a GEMM loses beside a collective, and how much more
            of it were all SMs taken from it.
        slow_collective: what a collective loses of its speed beside a GEMM.
        handover_s: seconds that each chunk waits for the other stream.
        rel_se: relative standard error of the time of GEMM and collective together.
    """

    late: float = 1.0
    slow_gemm: float = 0.15
    slow_sms: float = 1.0
    slow_collective: float = 0.3
    handover_s: float = 0.0
    rel_se: float = 0.1

    def seconds(self, gemm_s: float, collective_s: float, split: Split) -> float:
        """Time from the start of the GEMM to the end of the collective.

        Args:
            gemm_s: of one chunk alone.
            collective_s: of its collective alone.
            split: the chunks, and the SMs.
        """
        alone = min(1.0 + (0.0 if split.fits_beside else self.late), split.chunks)
        gemm = max(_SLOWEST, 1.0 - self.slow_gemm - self.slow_sms * split.share)
        collective = max(_SLOWEST, 1.0 - self.slow_collective)
        # Both run until one of them is done; the other goes on at its full rate.
        together_s = max(
            gemm_s + (1.0 - gemm) * collective_s / collective,
            collective_s + (1.0 - collective) * gemm_s / gemm,
        )
        turns_s = alone * (gemm_s + collective_s) + (split.chunks - alone) * together_s
        return turns_s + self.handover_s * split.chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A GEMM in ``chunks`` of ``rows`` by ``columns``, beside a collective on ``sms`` SMs.

    ``sm_count`` is the number that the device has.
    """

    chunks: float
    rows: float
    columns: float
    sms: float
    sm_count: int

    @property
    def share(self) -> float:
        """Part of the SMs that the collective takes from the GEMM: none of those left free."""
        return 0.0 if self.fits_beside else self.sms / self.sm_count

    @property
    def fits_beside(self) -> bool:
        """Whether a chunk's tiles leave so many SMs free."""
        tiles = math.ceil(self.rows / _TILE[0]) * math.ceil(self.columns / _TILE[1])
        return tiles + self.sms <= self.sm_count


def clock_share(seconds: Callable[[float], float]) -> float:
    """Part of a time that scales with 1/clock, from its values at the maximum and at the cap.

    It is negative where a slower clock hides more.

    Args:
        seconds: of a clock over the maximum.
    """
    return (seconds(_CAPPED_CLOCK) / seconds(1.0) - 1.0) / (1.0 / _CAPPED_CLOCK - 1.0)
