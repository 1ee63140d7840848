"""Prefill and decode on GPUs of their own: pools that balance, and the KV cache between them.

One engine with one layout prefills, another one with another layout decodes. Both were scored as
layouts that do both; here they are put together: as many instances of the one as the rate of the
other asks for, the time and energy to hand the cache over, and the pause of what is faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from energylens.cost.roofline import LINK_EFFICIENCY
from energylens.errors import SpecError
from energylens.explore.front import OBJECTIVES, Choice, exact_values, excess, pareto
from energylens.lower import cache_bytes, lower_stages
from energylens.results import Infeasible, Prediction
from energylens.results.search import Pool, PrefillPool, ScoredConfig
from energylens.spec.system import Parallelism, Phase

if TYPE_CHECKING:
    from energylens.explore.search import Search

Array = NDArray[np.float64]
IntArray = NDArray[np.int64]

NOTE = (
    "disaggregated layouts (prefill/decode): as many prefill instances as feed the decode ones, "
    "which are never short of requests; nothing queues; TTFT is a prefill and the transfer of its "
    "KV cache over the link at {efficiency:.0%} of its bandwidth, at the power of awake links "
    "({watts}); what prefill GPUs draw between prompts counts to the prompts; throughput of other "
    "layouts is that of decoding alone, as if nothing were prefilled beside it"
)

NO_LINK = "the KV cache goes over a link, and none is known between {gpus} x {device}"

_UTILISATION = "utilisation"
_ALIKE = 1e-3  # relative: closer values of a layout with an overlap and without are the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """An instance of a layout.

    Attributes:
        gpus: that it has; idle_w: what they draw while nothing runs.
        kv_bytes: cache of one prompt on the worker that holds the most of it.
        all_kv_bytes: the same on all workers that hold a part; ends: how many those are.
    """

    gpus: int
    idle_w: float
    kv_bytes: float
    all_kv_bytes: float
    ends: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Pairs:
    """Pairs of a row that prefills and a row that decodes, [pairs], with instances of each."""

    prefill: IntArray
    decode: IntArray
    prefill_count: IntArray
    decode_count: IntArray

    def __getitem__(self, which: NDArray[np.generic]) -> Pairs:
        return Pairs(
            prefill=self.prefill[which],
            decode=self.decode[which],
            prefill_count=self.prefill_count[which],
            decode_count=self.decode_count[which],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilling:
    """Pools that prefill, each [pools].

    Attributes:
        batch_s, prompt_j: of a batch on one instance, energy of each of its ``prompts``.
        count, gpus, idle_w: instances; GPUs of one, and what they draw while nothing runs.
    """

    batch_s: Array
    prompt_j: Array
    prompts: Array
    count: Array
    gpus: Array
    idle_w: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """Pools that decode, each [pools].

    Attributes:
        tpot_s: of the ``sequences`` of one instance.
        token_j, request_j: energy of a token of one of them, and of all of its tokens.
        count, gpus: instances, and GPUs of one.
    """

    tpot_s: Array
    token_j: Array
    request_j: Array
    sequences: Array
    count: Array
    gpus: Array


def combined(
    prefill: Prefilling, decode: Decoding, transfer_s: Array, transfer_j: Array, gen_len: int
) -> dict[str, Array]:
    """The values of pairs of pools by name, each [pools].

    Args:
        prefill: where prompts go first; it is fast enough.
        decode: where they go then; it always has as many sequences.
        transfer_s: of one request's cache in between.
        transfer_j: likewise.
        gen_len: generated tokens of a request, the one that prefill makes included.
    """
    decode_s = (gen_len - 1) * decode.tpot_s
    rate = decode.count * decode.sequences / decode_s
    busy = np.minimum(rate * prefill.batch_s / (prefill.count * prefill.prompts), 1.0)
    pause_j = prefill.count * prefill.idle_w * (1.0 - busy) / rate
    gpus = prefill.count * prefill.gpus + decode.count * decode.gpus
    throughput = decode.count * decode.sequences / decode.tpot_s
    ttft_s = prefill.batch_s + transfer_s
    prompt_j = prefill.prompt_j + pause_j + transfer_j
    prefill_w = prefill.prompts * prefill.prompt_j / prefill.batch_s
    decode_w = decode.sequences * decode.request_j / decode_s
    return {
        "energy_per_token_j": decode.token_j,
        "energy_per_request_j": prompt_j + decode.request_j,
        "energy_per_prompt_j": prompt_j,
        "ttft_s": ttft_s,
        "ttlt_s": ttft_s + decode_s,
        "total_power_w": prefill.count * prefill_w + decode.count * decode_w,
        "gpus": gpus,
        "gpu_s_per_request": gpus / rate,
        "tpot_s": decode.tpot_s,
        "throughput_tokens_s": throughput,
        "throughput_per_gpu_tokens_s": throughput / gpus,
        "gpu_s_per_token": gpus / throughput,
        _UTILISATION: busy,
    }


class Disaggregation:
    """All pairs of the layouts and batches that a search has scored."""

    def __init__(self, search: Search, chosen: Choice) -> None:
        """Pairs of what is in the table of ``chosen``.

        Raises:
            SpecError: a decode pool has nothing to do, or the cache has no known way to it.
        """
        if search.workload.gen_len < 2:
            raise SpecError(
                "--disaggregate needs something to decode: raise --gen-len to 2 or more"
            )
        if search.link is None:
            raise SpecError(
                f"--disaggregate: {NO_LINK.format(gpus=search.gpus, device=search.device.name)}; "
                "leave --disaggregate out, or choose devices with a known link"
            )
        self._search, self._chosen, self._table = search, chosen, chosen.table
        self._link = search.link
        self._sides = [self._side(p) for p in chosen.table.parallelism]

    def _side(self, parallelism: Parallelism) -> Side:
        search, one = self._search, replace(parallelism, replicas=1)
        stages = lower_stages(search.spec, search.engine, one, routing=search.config.routing)
        assert not isinstance(stages, Infeasible)  # it is in the table
        held = [cache_bytes(stage, 1, search.workload.prompt_len) for stage in stages]
        return Side(
            gpus=one.gpus,
            idle_w=sum(b.idle_w for b in search.machine(one).boards),
            kv_bytes=max(held),
            all_kv_bytes=one.tp * sum(held),
            ends=one.tp * one.pp,
        )

    def _of(self, rows: IntArray, name: str) -> Array:
        """A number of the layouts of ``rows``."""
        return np.array([getattr(side, name) for side in self._sides])[self._table.layout[rows]]

    def _transfer(self, pairs: Pairs) -> tuple[Array, Array]:
        """Seconds and joules of one request's cache: all workers send and receive at once."""
        ends = (pairs.prefill, pairs.decode)
        most = np.maximum(*(self._of(rows, "kv_bytes") for rows in ends))
        speed = LINK_EFFICIENCY * self._link.bandwidth_bytes_s
        seconds = self._link.latency_s + most / speed
        boards = sum(self._of(rows, "ends") for rows in ends)
        return seconds, seconds * boards * self._search.link_w

    def _once(self, which: NDArray[np.bool_] | np.bool_) -> IntArray:
        """Rows that run, each layout and batch once, however many replicas it is tried with."""
        table = self._table
        fewest = np.array([p.replicas == 1 for p in table.parallelism])[table.layout]
        return np.flatnonzero(table.runs & which & (fewest | (not self._search.any_replicas)))

    def _prefills(self) -> IntArray:
        """Rows to prefill with: powers of two of prompts up to a full step, none worse in all."""
        table, search = self._table, self._search
        serving = search.engine.serving
        limit = serving.offline_batch_tokens if serving else search.workload.prompt_len
        parts = np.array([p.dp * p.pp for p in table.parallelism])[table.layout]
        full = np.maximum(limit * parts // search.workload.prompt_len, 1)
        batch = table.batch
        few = (batch & (batch - 1) == 0) | (batch == full)
        rows = self._once(((batch <= full) & few) | (batch == batch.min()))
        return self._best(rows, "energy_per_prompt_j", "ttft_s", rate="ttft_s")

    def _decodes(self) -> IntArray:
        """Rows to decode with, none worse in all."""
        names = ("energy_per_token_j", "tpot_s", "total_power_w")
        return self._best(self._once(np.True_), *names, rate="tpot_s")

    def _best(self, rows: IntArray, *names: str, rate: str) -> IntArray:
        """Those of ``rows`` that no other one beats by values, rate and GPUs of an instance."""
        table = self._table
        columns = [np.log(table.values[name][rows]) for name in names]
        columns.append(-np.log(table.batch[rows] / table.values[rate][rows]))
        columns.append(self._of(rows, "gpus"))
        if "total_power_w" in names:  # of all replicas
            replicas = np.array([p.replicas for p in table.parallelism])[table.layout[rows]]
            columns[names.index("total_power_w")] -= np.log(replicas)
        costs = np.column_stack(columns).round(6)
        kept = self._plainest(rows, costs)
        return rows[kept][pareto(costs[kept])]

    def _plainest(self, rows: IntArray, costs: Array) -> IntArray:
        """Where in ``rows`` there is no overlap, or one that changes something.

        A pool only decodes, in steps that are mostly too small to overlap, or only prefills: it
        would name an overlap by chance.
        """
        overlapped = [bool(p.overlap) for p in self._table.parallelism]
        if not any(overlapped):
            return np.arange(len(rows))
        degrees = [replace(p, overlap=None) for p in self._table.parallelism]
        layouts, batches = self._table.layout[rows].tolist(), self._table.batch[rows].tolist()
        kept: dict[tuple[Parallelism, int], list[int]] = {}
        for i in sorted(range(len(rows)), key=lambda i: overlapped[layouts[i]]):
            others = kept.setdefault((degrees[layouts[i]], batches[i]), [])
            if not any(np.abs(costs[i] - costs[j]).max() < _ALIKE for j in others):
                others.append(i)
        return np.array(sorted(i for own in kept.values() for i in own), dtype=np.int64)

    def _pairs(self) -> Pairs:
        """Each row to prefill with and each to decode with, where both fit on the GPUs.

        As many instances decode as the GPUs and the power allow beside those that prefill for them;
        where the number of GPUs counts, fewer ones too.
        """
        prefill, decode = (
            a.ravel() for a in np.meshgrid(self._prefills(), self._decodes(), indexing="ij")
        )
        values, batch = self._table.values, self._table.batch
        gen_len, gpus = self._search.workload.gen_len, self._search.gpus
        fed = batch[prefill] / values["ttft_s"][prefill]
        taken = batch[decode] / ((gen_len - 1) * values["tpot_s"][decode])
        own = self._of(prefill, "gpus"), self._of(decode, "gpus")
        counts = np.arange(1, max(gpus, 2))[:, None]
        feeding = np.ceil(counts * taken / fed - 1e-9).astype(np.int64)
        fits = feeding * own[0] + counts * own[1] <= gpus
        count, pair = np.nonzero(fits)
        pairs = Pairs(
            prefill=prefill[pair],
            decode=decode[pair],
            prefill_count=feeding[count, pair],
            decode_count=count + 1,
        )
        held = self._values(pairs)["total_power_w"] <= self._search.max_power_w
        kept = held | (pairs.decode_count == 1)
        if not self._search.any_replicas:  # the last one of each pair
            most = np.full(len(prefill), -1)
            most[pair[kept]] = np.flatnonzero(kept)
            return pairs[most[most >= 0]]
        return pairs[kept]

    def _values(self, pairs: Pairs) -> dict[str, Array]:
        values, batch = self._table.values, self._table.batch.astype(np.float64)
        decode_j = values["energy_per_request_j"] - values["energy_per_prompt_j"]
        found = combined(
            Prefilling(
                batch_s=values["ttft_s"][pairs.prefill],
                prompt_j=values["energy_per_prompt_j"][pairs.prefill],
                prompts=batch[pairs.prefill],
                count=pairs.prefill_count.astype(np.float64),
                gpus=self._of(pairs.prefill, "gpus"),
                idle_w=self._of(pairs.prefill, "idle_w"),
            ),
            Decoding(
                tpot_s=values["tpot_s"][pairs.decode],
                token_j=values["energy_per_token_j"][pairs.decode],
                request_j=decode_j[pairs.decode],
                sequences=batch[pairs.decode],
                count=pairs.decode_count.astype(np.float64),
                gpus=self._of(pairs.decode, "gpus"),
            ),
            *self._transfer(pairs),
            gen_len=self._search.workload.gen_len,
        )
        return found | self._search.prices.values(found)

    def found(self, pool: Pool) -> Found:
        """The front of all pairs."""
        pairs = self._pairs()
        values, limits = self._values(pairs), self._chosen.constraints
        misses = _misses(values, limits)
        keeps = ~np.any([*misses.values(), np.zeros(len(pairs.prefill), dtype=np.bool_)], axis=0)
        meets = np.flatnonzero(keeps)
        columns = [OBJECTIVES[name] for name in self._chosen.objectives]
        costs = np.column_stack([sign * np.log(values[name]) for name, sign in columns]).round(9)
        front = meets[pareto(costs[meets])]
        front = front[np.lexsort(costs[front].T[::-1])]
        bests = [int(front[costs[front, j].argmin()]) for j in range(costs.shape[1]) if len(front)]
        spread = np.linspace(0, len(front) - 1, self._chosen.limit).round().astype(int)
        exact = {*bests, *(front[spread].tolist() if len(front) else ())}
        configs = []
        for row in front.tolist():
            own = {name: column[row : row + 1] for name, column in values.items()}
            made = self._config(pairs[np.array([row])], own, pool, exact=row in exact)
            configs += [made] if made is not None else []
        return Found(
            configs=tuple(configs),
            tried=len(pairs.prefill),
            filtered=len(pairs.prefill) - len(meets),
            filtered_by=MappingProxyType({name: int(m.sum()) for name, m in misses.items()}),
        )

    def _config(
        self, pair: Pairs, values: Mapping[str, Array], pool: Pool, *, exact: bool
    ) -> ScoredConfig | None:
        """A pair as a configuration, predicted exactly where asked for; None if it cannot run."""
        table = self._table
        (first,), (then,) = pair.prefill.tolist(), pair.decode.tolist()
        (prefills,), (decodes,) = pair.prefill_count.tolist(), pair.decode_count.tolist()
        prefill = replace(table.parallelism[table.layout[first]], replicas=prefills)
        decode = replace(table.parallelism[table.layout[then]], replicas=decodes)
        prompts, sequences = int(table.batch[first]), int(table.batch[then])
        prediction = None
        if exact:
            one = self._search.exactly(prefill, prompts, (Phase.PREFILL,))
            other = self._search.exactly(decode, sequences)
            if isinstance(one, Infeasible) or isinstance(other, Infeasible):
                return None
            values = self._exact_values(pair, one, other)
            rows = [r for r in other.breakdown if r.phase == Phase.DECODE]
            prediction = replace(
                other,
                phases=MappingProxyType(
                    {**one.phases, Phase.DECODE.value: other.phases[Phase.DECODE]}
                ),
                breakdown=(*one.breakdown, *rows),
                source=max(one.source, other.source),
            )
        transfer_s, _ = self._transfer(pair)
        shown = {name: v for name, v in values.items() if name != _UTILISATION}
        name = f"p{_short(prefill)}-x{prefills}-b{prompts}+d{_short(decode)}-x{decodes}"
        return ScoredConfig(
            id=f"{name}-b{sequences}",
            parallelism=decode,
            batch=sequences,
            prefill=PrefillPool(
                parallelism=prefill,
                batch=prompts,
                utilisation=float(values[_UTILISATION][0]),
                transfer_bytes=self._sides[table.layout[then]].all_kv_bytes,
                transfer_s=float(transfer_s[0]),
            ),
            pool=pool,
            values=MappingProxyType({n: float(v[0]) for n, v in shown.items()}),
            intervals=MappingProxyType(
                {n: (float(v.min()), float(v.max())) for n, v in shown.items()} if exact else {}
            ),
            exact=exact,
            filtered_by=tuple(
                limit
                for limit, miss in _misses(values, self._chosen.constraints).items()
                if miss[0]
            ),
            prediction=prediction,
        )

    def _exact_values(
        self, pair: Pairs, prefill: Prediction, decode: Prediction
    ) -> dict[str, Array]:
        """The values with the ends of their intervals, [value, low, high] of what they follow."""
        own = prefill.phases[Phase.PREFILL]
        of_decode = {name: np.array(ends) for name, ends in exact_values(decode).items()}
        prompts = prefill.workload.batch * prefill.parallelism.replicas
        found = combined(
            Prefilling(
                batch_s=np.array((own.latency_s, *own.interval.latency_s)),
                prompt_j=np.array((own.energy_j, *own.interval.energy_j)) / prompts,
                prompts=np.array(float(prefill.workload.batch)),
                count=pair.prefill_count.astype(np.float64),
                gpus=self._of(pair.prefill, "gpus"),
                idle_w=self._of(pair.prefill, "idle_w"),
            ),
            Decoding(
                tpot_s=of_decode["tpot_s"],
                token_j=of_decode["energy_per_token_j"],
                request_j=of_decode["energy_per_request_j"] - of_decode["energy_per_prompt_j"],
                sequences=np.array(float(decode.workload.batch)),
                count=pair.decode_count.astype(np.float64),
                gpus=self._of(pair.decode, "gpus"),
            ),
            *self._transfer(pair),
            gen_len=self._search.workload.gen_len,
        )
        return found | self._search.prices.values(found)


def _misses(
    values: Mapping[str, Array], limits: Mapping[str, float]
) -> dict[str, NDArray[np.bool_]]:
    """Where each constraint is missed."""
    return {name: over > 0 for name, over in excess(values, limits).items()}


def _short(parallelism: Parallelism) -> str:
    """``tp2-ep1-dp1``."""
    return parallelism.layout.replace(", ", "-").replace("=", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Disaggregated configurations, and how many pairs were tried, and miss a constraint."""

    configs: tuple[ScoredConfig, ...] = ()
    tried: int = 0
    filtered: int = 0
    filtered_by: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
