"""What is asked of a service: when requests arrive, and how long they are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from energylens.errors import OutOfRangeError, SpecError

Array = NDArray[np.float64]
IntArray = NDArray[np.int64]

ARRIVALS = ("poisson", "constant")
DURATION_S = 600.0
MOST_REQUESTS = 10_000_000  # a gigabyte of memory, minutes of simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What is asked of a service.

    Attributes:
        arrivals: ``poisson``, ``constant``, or a file with one arrival time in seconds a line.
        rate_per_s: mean rate of generated arrivals; None with a file, which has its own.
        lengths: prompt and generated tokens of the requests of a replica, in order, cycled.
        duration_s: how long requests arrive; None: 600 s, or all of the file.
        seed: of generated arrivals.
    """

    arrivals: str = "poisson"
    rate_per_s: float | None = None
    lengths: tuple[tuple[int, int], ...] = ((1024, 128),)
    duration_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        generated = self.arrivals in ARRIVALS
        if generated and self.rate_per_s is None:
            raise SpecError(f"{self.arrivals} arrivals need a rate in requests/s")
        if not generated and self.rate_per_s is not None:
            raise SpecError(
                f"a rate of {self.rate_per_s:g}/s and arrivals {self.arrivals!r}: a file sets the "
                f"rate, give one of the two; without a file: {', '.join(ARRIVALS)}"
            )
        for name in ("rate_per_s", "duration_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise OutOfRangeError(f"{name} must be a number above 0, not {value:g}")
        if self.seed < 0:
            raise OutOfRangeError(f"seed must be at least 0, not {self.seed}")
        for prompt_len, gen_len in self.lengths or ((0, 0),):
            if min(prompt_len, gen_len) < 1:
                raise OutOfRangeError(
                    "a request has at least 1 prompt and 1 generated token, not "
                    f"{prompt_len} and {gen_len}"
                )

    def times_s(self) -> Array:
        """Arrival times of all replicas' requests, ascending, [requests].

        Raises:
            SpecError: the file cannot be used, or no request arrives.
        """
        if self.rate_per_s is None:
            times = read_arrivals(self.arrivals)
            if self.duration_s is not None:
                times = times[times - times[0] < self.duration_s]
        else:
            duration = self.duration_s or DURATION_S
            if self.rate_per_s * duration > MOST_REQUESTS:
                raise OutOfRangeError(
                    f"{self.rate_per_s:g} requests/s for {duration:g} s are more than "
                    f"{MOST_REQUESTS} requests; lower one of them"
                )
            if self.arrivals == "constant":
                times = np.arange(math.ceil(duration * self.rate_per_s)) / self.rate_per_s
                times = times[times < duration]
            else:
                rng = np.random.default_rng(self.seed)
                count = rng.poisson(self.rate_per_s * duration)
                times = np.sort(rng.uniform(0.0, duration, count))
        if not len(times):
            raise SpecError(
                f"no request arrives in {self.duration_s or DURATION_S:g} s at "
                f"{self.rate_per_s:g}/s; raise the rate or the duration"
            )
        return times


def read_arrivals(name: str) -> Array:
    """Arrival times of a file, one in seconds a line, ascending; blank lines and # are skipped.

    Raises:
        SpecError: no such file, or a line is no time or below the one before it.
    """
    times: list[float] = []
    for where, text in _lines(Path(name), f"allowed: {', '.join(ARRIVALS)}, or such a file"):
        try:
            time = float(text)
        except ValueError:
            time = math.nan
        if not 0 <= time < math.inf:
            raise SpecError(f"{where}: {text!r} found, and must be a time in seconds from 0 on")
        if times and time < times[-1]:
            raise SpecError(f"{where}: {time:g} s is before the arrival above it ({times[-1]:g} s)")
        times.append(time)
    if not times:
        raise SpecError(f"{name}: holds no arrival times; give one in seconds a line")
    return np.array(times)


def read_lengths(path: Path) -> tuple[tuple[int, int], ...]:
    """Prompt and generated tokens of a file, ``prompt_len,gen_len`` a line.

    Raises:
        SpecError: no such file, or a line holds anything else.
    """
    lengths = []
    for where, text in _lines(path, "give one with lines `prompt_len,gen_len`"):
        parts = [part.strip() for part in text.split(",")]
        if len(parts) != 2 or not all(p.isdecimal() and int(p) > 0 for p in parts):
            raise SpecError(
                f"{where}: {text!r} found, and must be `prompt_len,gen_len`, each at least 1"
            )
        lengths.append((int(parts[0]), int(parts[1])))
    if not lengths:
        raise SpecError(f"{path}: holds no lengths; give lines `prompt_len,gen_len`")
    return tuple(lengths)


def _lines(path: Path, wanted: str) -> Iterator[tuple[str, str]]:
    """``file:line`` and text of the lines that say something."""
    if not path.is_file():
        raise SpecError(f"{path}: no such file; {wanted}")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise SpecError(f"{path}: not a text file; {wanted}") from None
    for number, line in enumerate(lines, start=1):
        if text := line.partition("#")[0].strip():
            yield f"{path}:{number}", text


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Requests:
    """Requests in order of arrival: times in s, tokens of prompt and answer, each [requests]."""

    arrival_s: Array
    prompt_len: IntArray
    gen_len: IntArray


def requests_of(times_s: Array, lengths: Sequence[tuple[int, int]]) -> Requests:
    """Requests that arrive at ``times_s`` [requests], with the lengths in order and cycled."""
    cycle = np.array(lengths, dtype=np.int64)
    chosen = cycle[np.arange(len(times_s)) % len(cycle)]
    return Requests(arrival_s=times_s, prompt_len=chosen[:, 0], gen_len=chosen[:, 1])
