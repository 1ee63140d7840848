"""Composition laws, each against a calculation by hand."""

import math

import numpy as np
import pytest
from helpers_schedule import totals_of

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


# ---------------------------------------------------------------- the serial part of a host's time

WAITING = Constants(eta=1.0, gap_s=0.0, wait_w=8.0, spin_w=50.0)


def serving(step_s, share, rel_se=0.1, source=Source.TRANSFERRED):
    return Host(step_s=step_s, rel_se=rel_se, source=source, serial_s=share * step_s)


def test_the_serial_part_of_the_host_adds_to_the_device_and_the_rest_hides_behind_it():
    ops, costs = [gemm()], [cost(10e-3, 4.0)]
    r = step(
        ops, costs, [worker(costs)], constants=WAITING, spreads=EXACT, host=serving(5e-3, 0.4),
        mode=Mode.SERVING,
    )  # fmt: skip
    # 2 of the host's 5 ms run beside no kernel, at idle power and 8 W more.
    assert r.latency_s == pytest.approx(12e-3)
    assert r.energy_j == pytest.approx(4.0 + 12e-3 * 100 + 2e-3 * 8)
    assert (r.regime, r.source) == ("device", Source.TRANSFERRED)
    (wait,) = (p for p in r.parts if p.kind is Kind.WAIT)
    assert (wait.latency_s, wait.energy_j) == pytest.approx((2e-3, 2e-3 * 8))
    assert wait.source is Source.TRANSFERRED


@pytest.mark.parametrize(
    ("device_s", "latency_s", "regime"),
    [(1e-3, 5e-3, "host"), (2.9e-3, 5e-3, "host"), (3.1e-3, 5.1e-3, "device")],
)
def test_the_host_binds_where_it_takes_longer_than_the_device_and_its_own_serial_part(
    device_s, latency_s, regime
):
    ops, costs = [gemm()], [cost(device_s, 0.4)]
    r = step(
        ops, costs, [worker(costs)], constants=WAITING, spreads=EXACT, host=serving(5e-3, 0.4),
        mode=Mode.SERVING,
    )  # fmt: skip
    assert r.latency_s == pytest.approx(latency_s)
    assert r.energy_j == pytest.approx(0.4 + latency_s * 100 + (latency_s - device_s) * 8)
    assert r.regime == regime


def test_two_boards_wait_for_one_host():
    ops, costs = [gemm()], [cost(10e-3, 4.0)]
    r = step(
        ops, costs, [worker(costs), worker(costs)], constants=WAITING, spreads=EXACT,
        host=serving(5e-3, 0.4), mode=Mode.SERVING,
    )  # fmt: skip
    assert r.energy_j == pytest.approx(2 * (4.0 + 12e-3 * 100 + 2e-3 * 8))


def test_pauses_between_steps_let_the_clock_rise_under_the_cap():
    # Pure compute, eta 1, 800 W at the full clock above 100 W idle, cap 500 W. With a pause of half
    # a second a step of 1/f seconds draws 800 f / (1/f + 1/2) = 400 W: 2 f^2 - f/2 - 1 = 0.
    ops, costs = [gemm()], [cost(1.0, 800.0, compute=1.0)]
    f = (0.5 + math.sqrt(0.25 + 8)) / 4
    r = step(
        ops, costs, [worker(costs, cap_w=500.0)], constants=NONE, spreads=EXACT,
        host=serving(1.0, 0.5), mode=Mode.SERVING,
    )  # fmt: skip
    assert r.clock == pytest.approx(f, rel=1e-5)
    assert f > math.sqrt(0.5)  # that of the same work without a pause, above
    assert r.latency_s == pytest.approx(1 / f + 0.5, rel=1e-5)
    assert r.energy_j == pytest.approx(500.0 * (1 / f + 0.5), rel=1e-5)
    assert r.regime == "capped"
    time, energy, clock = kernel_result(ops, costs, worker(costs, cap_w=500.0), NONE, pause_s=0.5)
    assert (time, clock) == pytest.approx((1 / f, f), rel=1e-5)
    assert energy == pytest.approx(r.energy_j - 0.5 * 100, rel=1e-5)


def test_a_pause_that_is_long_enough_keeps_the_full_clock():
    ops, costs = [gemm()], [cost(1.0, 800.0, compute=1.0)]
    # (100 + 800 / (1 + p)) <= 500 from a pause of one second on.
    host = serving(1.01, 1.0)
    r = step(
        ops, costs, [worker(costs, cap_w=500.0)], constants=NONE, spreads=EXACT, host=host,
        mode=Mode.SERVING,
    )  # fmt: skip
    assert (r.clock, r.latency_s) == pytest.approx((1.0, 2.01))
    assert r.regime == "device"


@pytest.mark.parametrize(
    ("mode", "without"), [(Mode.CUDA_GRAPH, frozenset()), (Mode.SERVING, frozenset({"host"}))]
)
def test_a_captured_graph_alone_has_no_serial_part_and_no_pause(mode, without):
    ops, costs = [gemm()], [cost(1.0, 800.0, compute=1.0)]
    r = step(
        ops, costs, [worker(costs, cap_w=500.0)], constants=WAITING, spreads=EXACT,
        host=serving(1.0, 0.5), mode=mode, without=without,
    )  # fmt: skip
    f = math.sqrt(0.5)
    assert (r.clock, r.latency_s) == pytest.approx((f, 1 / f), rel=1e-5)
    assert r.source is Source.MEASURED
    assert not [p for p in r.parts if p.kind is Kind.WAIT]


def interval(share, rel_se, device_s=10e-3):
    ops, costs = [gemm()], [cost(device_s, 4.0)]
    r = step(
        ops, costs, [worker(costs)], constants=WAITING, spreads=EXACT,
        host=serving(5e-3, share, rel_se), mode=Mode.SERVING,
    )  # fmt: skip
    for name in ("latency_s", "energy_j"):
        low, high = getattr(r.interval, name)
        assert low <= getattr(r, name) <= high
    return r.interval


def test_the_hosts_error_moves_its_serial_part_only_where_the_device_binds():
    # 2 of 12 ms are serial and 30 % uncertain: 5 % of the step, and 2 ms * 108 W of its 5.216 J.
    z, found = 1.6448536, interval(0.4, 0.3)
    low, high = found.latency_s
    assert math.log(high / low) / (2 * z) == pytest.approx(0.3 * 2 / 12, rel=1e-6)
    low, high = found.energy_j
    assert math.log(high / low) / (2 * z) == pytest.approx(0.3 * 2e-3 * 108 / 5.216, rel=1e-6)
    nothing = interval(0.0, 0.3)
    assert nothing.latency_s[0] == pytest.approx(nothing.latency_s[1])


@pytest.mark.parametrize("device_s", [1e-3, 4.9e-3, 10e-3])
def test_intervals_widen_with_the_hosts_error(device_s):
    found = [interval(0.4, rel_se, device_s) for rel_se in (0.0, 0.05, 0.15, 0.35, 0.6)]
    for name in ("latency_s", "energy_j"):
        widths = [getattr(i, name)[1] - getattr(i, name)[0] for i in found]
        assert widths == sorted(widths)
        assert widths[-1] > widths[0] + 1e-9


def test_totals_are_those_of_the_step():
    ops, costs = [gemm(count=4), gemm()], [cost(1e-3, 0.9, compute=1.0), cost(2e-3, 0.5)]
    workers = [worker(costs, cap_w=420.0), worker(costs, idle_w=110.0, cap_w=420.0)]
    constants = Constants(eta=1.1, gap_s=2e-6, wait_w=5.0, spin_w=30.0)
    for mode in Mode:
        for host in (serving(9e-3, 0.0), serving(2e-3, 0.5), serving(9e-3, 1.0)):
            r = step(
                ops, costs, workers, constants=constants, spreads=EXACT, host=host, mode=mode
            )  # fmt: skip
            if mode is not Mode.CUDA_GRAPH:
                found = totals_of(ops, costs, workers, constants, host)
                assert found == pytest.approx((r.latency_s, r.energy_j), rel=1e-12)
