"""A configuration as a service: limits, KV cache, prices, simulation, and what it comes to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from energylens.cost.bundle import Bundle, select
from energylens.errors import SpecError
from energylens.lower import Lowered, cache_bytes, lower, memory
from energylens.lower.overlap import check_sms
from energylens.machine import StepSums, machine
from energylens.predict import predict
from energylens.results import Anchors, Infeasible, Prediction
from energylens.results.service import (
    CacheUse,
    MeanMax,
    Percentiles,
    ServingInterval,
    ServingResult,
    TrafficSummary,
)
from energylens.serving.batching import Replica, Simulation
from energylens.serving.prices import PriceTable
from energylens.serving.traffic import DURATION_S, Requests, Traffic, requests_of
from energylens.spec.machines import load_engine
from energylens.spec.model import Spec
from energylens.spec.resources import list_resources
from energylens.spec.system import (
    Config,
    Device,
    Engine,
    Link,
    Mode,
    Phase,
    Serving,
    Step,
    Workload,
)

Array = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What to change of an engine's own limits: most tokens, and most sequences of a step."""

    batch_tokens: int | None = None
    max_sequences: int | None = None


def serve(
    spec: Spec,
    *,
    engine: Engine,
    device: Device,
    traffic: Traffic,
    config: Config = Config(),
    limits: Limits = Limits(),
    steady_state: bool = False,
    bundles: Sequence[Bundle] = (),
    anchors: Anchors | None = None,
    link: Link | None = None,
) -> ServingResult | Infeasible:
    """Latency and energy of a service under traffic.

    Replicas get the requests round robin. The first one is simulated, with every n-th request, and
    stands for all of them.

    Args:
        spec: the model.
        engine: how it becomes kernels, and how requests become steps.
        device: what it runs on.
        traffic: the requests of all replicas.
        config: degrees and power limit; the launch mode is that of serving.
        limits: what to change of the engine's own limits.
        steady_state: refuse a rate that is not sustained, instead of simulating how the queue
            grows.
        bundles: calibrations, as for `energylens.predict.predict`.
        anchors: of the boards and their host, likewise.
        link: interconnect of the workers, likewise.

    Returns:
        What the requests meet and cost, or why the configuration cannot serve them.

    Raises:
        SpecError: the engine forms no steps, an overlap takes all SMs of the device, or an arrivals
            file cannot be used.
        OutOfRangeError: a limit cannot be, or a request is longer than the KV cache.
    """
    service = service_of(
        spec,
        engine=engine,
        device=device,
        config=config,
        limits=limits,
        bundles=bundles,
        anchors=anchors,
        link=link,
    )
    replica = service.replica(longest=max(p + g for p, g in traffic.lengths))
    if isinstance(replica, Infeasible):
        return replica
    return service.serve(replica, traffic, steady_state=steady_state)


def service_of(
    spec: Spec,
    *,
    engine: Engine,
    device: Device,
    config: Config = Config(),
    limits: Limits = Limits(),
    bundles: Sequence[Bundle] = (),
    anchors: Anchors | None = None,
    link: Link | None = None,
) -> Service:
    """A configuration as a service; see `serve` for the arguments and errors."""
    check_sms(spec, config.parallelism, device)
    engine = engine.on(device)
    return Service(
        spec=spec,
        engine=replace(engine, serving=_limited(engine, limits)),
        device=device,
        config=config,
        bundles=tuple(bundles),
        anchors=anchors,
        link=link,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Service:
    """A configuration, and the prices of its steps."""

    spec: Spec
    engine: Engine
    device: Device
    config: Config
    bundles: tuple[Bundle, ...]
    anchors: Anchors | None
    link: Link | None

    def replica(self, *, longest: int) -> Replica | Infeasible:
        """One replica, for contexts of up to ``longest`` tokens, or why there is none."""
        serving = self.engine.serving
        assert serving is not None  # `_limited` has made it
        parallelism = self.config.parallelism
        for name, what in (("dp", "attention data"), ("pp", "pipeline")):
            if getattr(parallelism, name) > 1:
                return Infeasible(
                    reason=f"{name}={getattr(parallelism, name)}: a service with {what} "
                    "parallelism is not simulated; use replicas, or a batch without traffic"
                )
        lowered = lower(
            self.spec,
            self.engine,
            parallelism,
            routing=self.config.routing,
            redundant_experts=self.config.redundant_experts,
        )
        if isinstance(lowered, Infeasible):
            return lowered
        blocks = kv_tokens(lowered, self.device, longest) // serving.block_size
        if blocks < 1:
            return Infeasible(
                reason=f"{self.spec.name} does not fit {self.device.name}: weights and "
                "activations leave no room for a KV cache within "
                f"{100 * serving.memory_share:g} % of its memory; raise --tp, or lower "
                "--max-batch-tokens"
            )
        priced = machine(
            self.device,
            workers=parallelism.workers,
            bundle=select(self.bundles, self.device.name, self.engine.provider),
            anchors=self.anchors,
            power_limit_w=self.config.power_limit_w,
            link=self.link,
            captured_tokens=self.engine.captured_tokens,
        )

        sums = StepSums(priced.model)

        def price(steps: Sequence[Step]) -> tuple[Array, Array]:
            latency, energy = priced.price(sums, (lowered,), steps)
            return latency[:, 0], energy[:, 0]

        return Replica(
            prices=PriceTable(price, serving=serving, longest=longest),
            serving=serving,
            blocks=blocks,
            idle_w=sum(b.idle_w for b in priced.boards),
            ahead=True,
        )

    def with_replicas(self, replicas: int) -> Service:
        """The same with so many replicas, each of which is the same `Replica` again."""
        parallelism = replace(self.config.parallelism, replicas=replicas)
        return replace(self, config=replace(self.config, parallelism=parallelism))

    def serve(
        self, replica: Replica, traffic: Traffic, *, steady_state: bool = False
    ) -> ServingResult | Infeasible:
        """What the requests of all replicas meet and cost; see `energylens.serving.serve`."""
        parallelism = self.config.parallelism
        times = traffic.times_s()
        requests = requests_of(times[:: parallelism.replicas], traffic.lengths)
        summary = _summary(traffic, times, requests)
        rate = summary.rate_per_s or 0.0
        sustained = parallelism.replicas * replica.saturation_rate(traffic.lengths)
        asked = f"{rate:.4g} requests/s, and it saturates at {sustained:.4g}/s"
        if steady_state and rate > sustained:
            return Infeasible(
                reason=f"no steady state of {self.spec.name} on {parallelism.gpus} x "
                f"{self.device.name} at {asked}; lower the rate, or raise --replicas or --tp"
            )
        run = replica.simulate(requests)
        prompt, decode = self.typical_steps(requests, run)
        for step in (prompt, decode):
            if isinstance(step, Infeasible):
                return step
        assert isinstance(prompt, Prediction) and isinstance(decode, Prediction)
        notes = [*prompt.notes, *decode.notes]
        if rate > sustained:
            notes.append(
                f"the traffic asks for {asked}: the queue grows as long as requests arrive"
            )
        if parallelism.replicas > 1:
            notes.append("requests go round robin; the first replica stands for all of them")
        return _result(
            prompt, decode, requests, run, replica, summary, sustained, tuple(dict.fromkeys(notes))
        )

    def typical_steps(
        self, requests: Requests, run: Simulation
    ) -> tuple[Prediction | Infeasible, Prediction | Infeasible]:
        """A prefill of the mean prompt, and a decode step of the mean batch and context."""
        batch = max(1, round(run.running.mean * run.window_s / run.busy_s))
        context = float((requests.prompt_len + requests.gen_len / 2).mean())
        prompt = Workload(prompt_len=round(float(requests.prompt_len.mean())), gen_len=1)
        decode = Workload(batch=batch, prompt_len=1, gen_len=1, context_len=context)
        return self._step(Phase.PREFILL, prompt), self._step(Phase.DECODE, decode)

    def _step(self, phase: Phase, workload: Workload) -> Prediction | Infeasible:
        return predict(
            self.spec,
            engine=self.engine,
            device=self.device,
            config=replace(self.config, modes=MappingProxyType({phase: Mode.SERVING})),
            workload=workload,
            bundles=self.bundles,
            anchors=self.anchors,
            phases=(phase,),
            link=self.link,
        )


def kv_tokens(lowered: Lowered, device: Device, longest: int) -> int:
    """Tokens that the KV cache of a replica holds of requests of ``longest``, in whole blocks.

    As vLLM sizes it: what its share of the device memory has left beside the weights and the
    activations of the largest step. Shorter requests fill it as much, but for layers with a window.
    """
    serving = lowered.engine.serving
    assert serving is not None  # `_limited` has checked it
    largest = Workload(batch=1, prompt_len=serving.batch_tokens, gen_len=1)
    held = memory(lowered, largest, device)
    per_token = cache_bytes(lowered, 1, longest) / longest
    room = serving.memory_share * held.capacity_bytes - held.weights_bytes - held.activations_bytes
    return max(0, math.floor(room / per_token) // serving.block_size * serving.block_size)


def _limited(engine: Engine, limits: Limits) -> Serving:
    """The engine's limits with those that were given."""
    if engine.serving is None:
        able = [name for name in list_resources("engines") if load_engine(name).serving]
        raise SpecError(
            f"engine {engine.name} has no `serving` section: it does not form steps out of "
            f"requests; engines that do: {', '.join(able)}"
        )
    return engine.serving.limited(
        batch_tokens=limits.batch_tokens, max_sequences=limits.max_sequences
    )


def _summary(traffic: Traffic, times: Array, requests: Requests) -> TrafficSummary:
    rate, duration = traffic.rate_per_s, traffic.duration_s or DURATION_S
    if rate is None:
        duration = float(times[-1] - times[0])
        rate = (len(times) - 1) / duration if duration > 0 else None

    def over(lengths: IntArray) -> MeanMax:
        return MeanMax(mean=float(lengths.mean()), max=int(lengths.max()))

    return TrafficSummary(
        rate_per_s=rate,
        arrivals=traffic.arrivals,
        requests=len(times),
        duration_s=duration,
        prompt_len=over(requests.prompt_len),
        gen_len=over(requests.gen_len),
        seed=traffic.seed,
    )


def percentiles(values: Array) -> Percentiles:
    """Mean and percentiles of ``values`` [any], linear between the sorted values."""
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return Percentiles(mean=float(values.mean()), p50=p50, p90=p90, p99=p99)


def tpot_s(requests: Requests, run: Simulation) -> Array:
    """Time per output token after the first, of the requests that make a second one, in s."""
    several = requests.gen_len > 1
    spent = run.completion_s[several] - run.first_token_s[several]
    return np.asarray(spent / (requests.gen_len[several] - 1))


def _result(
    prompt: Prediction,
    decode: Prediction,
    requests: Requests,
    run: Simulation,
    replica: Replica,
    traffic: TrafficSummary,
    sustained_per_s: float,
    notes: tuple[str, ...],
) -> ServingResult:
    replicas, gpus = prompt.parallelism.replicas, prompt.parallelism.gpus
    count, generated = len(requests.arrival_s), int(requests.gen_len.sum())
    each, per_token = run.energy_j / count, tpot_s(requests, run)
    mean_w = run.energy_j / run.window_s / (gpus // replicas)
    tpot = percentiles(per_token) if len(per_token) else None
    return ServingResult(
        spec=prompt.spec,
        device=prompt.device,
        engine=prompt.engine,
        parallelism=prompt.parallelism,
        traffic=traffic,
        window_s=run.window_s,
        energy_per_request_j=each,
        energy_per_token_j=run.energy_j / generated,
        mean_power_w=mean_w,
        total_power_w=mean_w * gpus,
        energy_j=each * traffic.requests,
        ttft_s=percentiles(run.first_token_s - requests.arrival_s),
        tpot_s=tpot,
        e2e_s=percentiles(run.completion_s - requests.arrival_s),
        requests_per_s=replicas * count / run.window_s,
        tokens_per_s=replicas * generated / run.window_s,
        queue=run.queue,
        running=run.running,
        kv_cache=CacheUse(
            capacity_tokens=replica.blocks * replica.serving.block_size,
            mean_share=run.held_share.mean,
            peak_share=run.held_share.max,
        ),
        preemptions=run.preemptions,
        steps=run.steps,
        saturation_rate_per_s=sustained_per_s,
        saturated=(traffic.rate_per_s or 0.0) > sustained_per_s,
        utilisation=run.busy_s / run.window_s,
        interval=_interval(prompt, decode, traffic.gen_len.mean, each, tpot),
        source=max(prompt.source, decode.source),
        bundles=prompt.bundles,
        anchors=prompt.anchors,
        notes=notes,
    )


def _interval(
    prompt: Prediction,
    decode: Prediction,
    gen_len: float,
    energy_j: float,
    tpot: Percentiles | None,
) -> ServingInterval:
    """Relative ends of a mean prefill and a mean decode step, by their shares of the energy."""
    whole, step = prompt.phases[Phase.PREFILL], decode.phases[Phase.DECODE]
    weights = (whole.energy_j, step.energy_j / decode.workload.batch * (gen_len - 1))

    def energy(side: int) -> float:
        ends = (whole.interval.energy_j[side], step.interval.energy_j[side])
        relative = (ends[0] / whole.energy_j, ends[1] / step.energy_j)
        return energy_j * float(np.average(relative, weights=weights))

    def pace(mean_s: float, side: int) -> float:
        return mean_s * step.interval.latency_s[side] / step.latency_s

    return ServingInterval(
        level=step.interval.level,
        energy_per_request_j=(energy(0), energy(1)),
        tpot_s=(pace(tpot.mean, 0), pace(tpot.mean, 1)) if tpot else None,
    )
