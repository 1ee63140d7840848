"""Composition laws, each against a calculation by hand."""

import math

import numpy as np
import pytest

from energylens.graph import make_op
from energylens.results import Cost, Kind, Source
from energylens.schedule import Constants, Host, Spreads, Worker, kernel_result, step
from energylens.spec.system import Mode

NONE = Constants(eta=1.0, gap_s=0.0, wait_w=0.0, spin_w=0.0)
EXACT = Spreads(
    memory_power=0.0, compute_power=0.0, memory_time=0.0, latency=0.0, energy=0.0, cap=0.0
)


def gemm(count=1, launches=1, name="g"):
    return make_op("gemm", m=8, n=8, k=8, count=count, launches=launches, name=name)


def cost(latency_s, energy_j, compute=0.0, se=0.0, source=Source.MEASURED):
    return Cost(
        latency_s=latency_s,
        energy_j=energy_j,
        compute_share=compute,
        read_share=0.0,
        dram_share=0.0,
        latency_rel_se=se,
        energy_rel_se=se,
        source=source,
    )


def worker(costs, idle_w=100.0, cap_w=1e9):
    return Worker(
        idle_w=idle_w,
        cap_w=cap_w,
        latency_s=np.array([c.latency_s for c in costs]),
        energy_j=np.array([c.energy_j for c in costs]),
    )


def test_kernels_add_up_with_their_counts_and_gaps():
    ops, costs = [gemm(count=3), gemm(count=2, launches=5)], [cost(1e-3, 0.2), cost(2e-3, 0.5)]
    constants = Constants(eta=1.0, gap_s=1e-6, wait_w=0.0, spin_w=0.0)
    r = step(ops, costs, [worker(costs)], constants=constants, spreads=EXACT)
    latency = 3 * 1e-3 + 2 * 2e-3 + (3 + 10) * 1e-6
    assert r.latency_s == pytest.approx(latency)
    assert r.energy_j == pytest.approx(3 * 0.2 + 2 * 0.5 + 100 * latency)
    assert r.regime == "device"


def test_without_gap_leaves_the_kernels_alone():
    ops, costs = [gemm(count=2)], [cost(1e-3, 0.1)]
    constants = Constants(eta=1.0, gap_s=1e-4, wait_w=0.0, spin_w=0.0)
    r = step(
        ops, costs, [worker(costs)], constants=constants, spreads=EXACT, without=frozenset({"gap"})
    )
    assert r.latency_s == pytest.approx(2e-3)


def test_a_mix_under_the_cap_shares_the_clock_that_holds_it():
    # Pure compute, eta 1: t(f) = T/f, dynamic power D f / (T/f) = (D/T) f^2. 800 W at full clock
    # above 100 W idle, cap 500 W -> f = sqrt(400 / 800).
    ops, costs = [gemm()], [cost(1.0, 800.0, compute=1.0)]
    time, energy, clock = kernel_result(ops, costs, worker(costs, cap_w=500.0), NONE)
    f = math.sqrt(0.5)
    assert clock == pytest.approx(f, rel=1e-5)
    assert time == pytest.approx(1 / f, rel=1e-5)
    assert energy / time == pytest.approx(500.0, rel=1e-5)


def test_memory_bound_work_keeps_its_time_under_the_cap():
    ops, costs = [gemm()], [cost(1.0, 800.0, compute=0.0)]
    time, energy, clock = kernel_result(ops, costs, worker(costs, cap_w=500.0), NONE)
    assert time == pytest.approx(1.0)
    assert clock == pytest.approx(0.5, rel=1e-5)
    assert energy == pytest.approx(500.0, rel=1e-5)


def test_the_average_of_a_mix_decides_not_its_hottest_op():
    # One op alone would overrun a 500 W cap (600 W), the other draws 300 W: together 450 W.
    ops, costs = [gemm(), gemm()], [cost(1.0, 500.0, compute=1.0), cost(1.0, 200.0, compute=1.0)]
    _, _, clock = kernel_result(ops, costs, worker(costs, cap_w=500.0), NONE)
    assert clock == 1.0


def test_an_eager_step_waits_for_its_host_and_draws_waiting_power():
    ops, costs = [gemm()], [cost(1e-3, 0.4)]
    constants = Constants(eta=1.0, gap_s=0.0, wait_w=8.0, spin_w=50.0)
    host = Host(step_s=5e-3, rel_se=0.1, source=Source.TRANSFERRED)
    r = step(ops, costs, [worker(costs)], constants=constants, spreads=EXACT, host=host)
    assert r.latency_s == pytest.approx(5e-3)
    assert r.energy_j == pytest.approx(0.4 + 5e-3 * 100 + 4e-3 * 8)
    assert (r.regime, r.source) == ("host", Source.TRANSFERRED)


@pytest.mark.parametrize(
    ("mode", "without"), [(Mode.CUDA_GRAPH, frozenset()), (Mode.EAGER, frozenset({"host"}))]
)
def test_a_captured_step_or_one_without_the_law_ignores_the_host(mode, without):
    ops, costs = [gemm()], [cost(1e-3, 0.4)]
    host = Host(step_s=5e-3, rel_se=0.1, source=Source.MEASURED)
    r = step(
        ops, costs, [worker(costs)], constants=NONE, spreads=EXACT, host=host, mode=mode,
        without=without,
    )  # fmt: skip
    assert r.latency_s == pytest.approx(1e-3)


def test_the_slowest_worker_sets_the_pace_and_the_other_spins():
    ops, costs = [gemm()], [cost(1.0, 100.0)]
    slow = Worker(idle_w=100.0, cap_w=1e9, latency_s=np.array([1.2]), energy_j=np.array([110.0]))
    constants = Constants(eta=1.0, gap_s=0.0, wait_w=0.0, spin_w=30.0)
    r = step(ops, costs, [worker(costs), slow], constants=constants, spreads=EXACT)
    assert r.latency_s == pytest.approx(1.2)
    assert r.energy_j == pytest.approx(100 + 110 + 0.2 * 30 + 1.2 * 200)


def test_parts_add_up_in_time_and_energy():
    ops, costs = [gemm(count=4), gemm()], [cost(1e-3, 0.9, compute=1.0), cost(2e-3, 0.5)]
    constants = Constants(eta=1.1, gap_s=2e-6, wait_w=5.0, spin_w=30.0)
    host = Host(step_s=9e-3, rel_se=0.1, source=Source.MEASURED)
    workers = [worker(costs, cap_w=420.0), worker(costs, idle_w=110.0, cap_w=400.0)]
    r = step(ops, costs, workers, constants=constants, spreads=EXACT, host=host)
    assert sum(p.latency_s for p in r.parts) == pytest.approx(r.latency_s)
    assert sum(p.energy_j for p in r.parts) == pytest.approx(r.energy_j)
    assert {p.kind for p in r.parts} >= {Kind.GEMM, Kind.WAIT, Kind.IDLE}


def test_errors_of_one_kind_do_not_average_out():
    # Ten ops of one kind, each 10 % uncertain, fully correlated: so is the sum, and not by 3 %.
    ops = [gemm(name=f"g{i}") for i in range(10)]
    costs = [cost(1e-3, 0.0, se=0.1)] * 10
    r = step(ops, costs, [worker(costs)], constants=NONE, spreads=EXACT)
    low, high = r.interval.latency_s
    z = 1.6448536
    assert math.log(high / low) / (2 * z) == pytest.approx(math.log(1.1), rel=1e-3)


def test_the_weakest_source_names_the_step():
    ops, costs = [gemm(), gemm()], [cost(1e-3, 0.1), cost(1e-3, 0.1, source=Source.EXTRAPOLATED)]
    r = step(ops, costs, [worker(costs)], constants=NONE, spreads=EXACT)
    assert r.source is Source.EXTRAPOLATED
