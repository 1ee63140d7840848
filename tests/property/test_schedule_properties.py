"""What must hold for any step."""

import numpy as np
import pytest
from helpers_schedule import totals_of
from hypothesis import given
from hypothesis import strategies as st

from energylens.graph import make_op
from energylens.results import Cost, Source
from energylens.schedule import (
    NO_HOST,
    Constants,
    Host,
    Spreads,
    Worker,
    kernel_result,
    step,
)
from energylens.spec.system import Mode

SPREADS = Spreads(
    memory_power=0.05, compute_power=0.03, memory_time=0.01, latency=0.02, energy=0.02, cap=0.01
)
costs = st.builds(
    Cost,
    latency_s=st.floats(1e-6, 1e-2),
    energy_j=st.floats(0.0, 8.0),
    compute_share=st.floats(0.0, 1.0),
    read_share=st.just(0.0),
    dram_share=st.floats(0.0, 1.0),
    latency_rel_se=st.floats(0.0, 0.2),
    energy_rel_se=st.floats(0.0, 0.3),
    source=st.sampled_from(Source),
)
mixes = st.lists(st.tuples(costs, st.integers(1, 64)), min_size=1, max_size=6)
constants = st.builds(
    Constants,
    eta=st.floats(0.5, 2.0),
    gap_s=st.floats(0.0, 2e-6),
    wait_w=st.floats(0.0, 40.0),
    spin_w=st.floats(0.0, 60.0),
)
hosts = st.builds(
    lambda step_s, share, rel_se, source: Host(
        step_s=step_s, rel_se=rel_se, source=source, serial_s=share * step_s
    ),
    step_s=st.floats(0.0, 0.05),
    share=st.floats(0.0, 1.0),
    rel_se=st.floats(0.0, 0.6),
    source=st.sampled_from(Source),
)


def build(mix, cap_w=690.0):
    ops = [make_op("gemm", m=1, n=1, k=1, count=n) for _, n in mix]
    priced = [c for c, _ in mix]
    own = Worker(
        idle_w=120.0,
        cap_w=cap_w,
        latency_s=np.array([c.latency_s for c in priced]),
        energy_j=np.array([c.energy_j for c in priced]),
    )
    return ops, priced, own


@given(mixes, constants)
def test_power_lies_between_idle_and_cap(mix, k):
    ops, priced, own = build(mix)
    time, energy, clock = kernel_result(ops, priced, own, k)
    assert energy >= 120.0 * time * (1 - 1e-9)
    if clock > 0.2501:  # below that the governor cannot go
        assert energy / time <= 690.0 * (1 + 1e-4)


@given(mixes, constants)
def test_a_cap_never_makes_a_step_faster_and_never_costs_dynamic_energy(mix, k):
    ops, priced, own = build(mix)
    capped = kernel_result(ops, priced, own, k)
    free = kernel_result(ops, priced, build(mix, cap_w=1e12)[2], k)
    assert capped[0] >= free[0] * (1 - 1e-9)
    assert capped[1] - 120 * capped[0] <= (free[1] - 120 * free[0]) * (1 + 1e-9)


@given(mixes, constants)
def test_interval_holds_the_prediction_and_parts_add_up(mix, k):
    ops, priced, own = build(mix)
    r = step(ops, priced, [own, own], constants=k, spreads=SPREADS)
    assert r.interval.latency_s[0] <= r.latency_s <= r.interval.latency_s[1]
    assert r.interval.energy_j[0] <= r.energy_j <= r.interval.energy_j[1]
    assert np.isclose(sum(p.latency_s for p in r.parts), r.latency_s)
    assert np.isclose(sum(p.energy_j for p in r.parts), r.energy_j)


@given(mixes, constants, st.integers(2, 4))
def test_two_equal_workers_take_the_time_of_one_and_twice_its_energy(mix, k, n):
    ops, priced, own = build(mix)
    one = step(ops, priced, [own], constants=k, spreads=SPREADS)
    many = step(ops, priced, [own] * n, constants=k, spreads=SPREADS)
    assert np.isclose(many.latency_s, one.latency_s)
    assert np.isclose(many.energy_j, n * one.energy_j)


@given(mixes, constants, hosts, st.sampled_from(Mode), st.floats(150.0, 700.0))
def test_a_step_with_a_host_keeps_to_its_bounds_and_its_totals(mix, k, host, mode, cap_w):
    ops, priced, own = build(mix, cap_w=cap_w)
    r = step(ops, priced, [own, own], constants=k, spreads=SPREADS, host=host, mode=mode)
    assert r.interval.latency_s[0] <= r.latency_s * (1 + 1e-12)
    assert r.latency_s <= r.interval.latency_s[1] * (1 + 1e-12)
    assert r.interval.energy_j[0] <= r.energy_j * (1 + 1e-12)
    assert r.energy_j <= r.interval.energy_j[1] * (1 + 1e-12)
    assert np.isclose(sum(p.latency_s for p in r.parts), r.latency_s)
    assert np.isclose(sum(p.energy_j for p in r.parts), r.energy_j)
    waits = NO_HOST if mode is Mode.CUDA_GRAPH else host
    found = totals_of(ops, priced, [own, own], k, waits)
    assert found == pytest.approx((r.latency_s, r.energy_j), rel=1e-12)
    if mode is Mode.CUDA_GRAPH:
        assert r == step(ops, priced, [own, own], constants=k, spreads=SPREADS)
    else:
        assert r.latency_s >= host.step_s
        # The kernels under the same cap with a pause as long as the serial part, and that part.
        device_s, _, _ = kernel_result(ops, priced, own, k, host.serial_s)
        assert np.isclose(r.latency_s, max(device_s + host.serial_s, host.step_s))


@given(mixes, constants, st.floats(0.0, 0.02), st.floats(0.0, 0.02))
def test_a_longer_pause_never_lowers_the_clock(mix, k, one, other):
    ops, priced, own = build(mix, cap_w=300.0)
    clocks = [kernel_result(ops, priced, own, k, p)[2] for p in sorted((one, other))]
    assert clocks[0] <= clocks[1] + 1e-6
