import pytest
from fake_board import FakeBoard, FakeWork
from hypothesis import given, settings
from hypothesis import strategies as st

from energylens.bench.trial import TrialLimits, measure

LIMITS = TrialLimits(power_limit_w=700.0)


def run(
    board: FakeBoard, seconds: float = 2e-4, limits: TrialLimits = LIMITS, executions: int = 10
):
    work = FakeWork(board, seconds=seconds, executions=executions)
    return measure(work, board, board.uuid, limits=limits, sleep=board.sleep)


@settings(max_examples=25, deadline=None)
@given(
    seconds=st.floats(2e-6, 0.05),
    executions=st.integers(1, 200),
    watts=st.floats(150, 640),
)
def test_a_steady_work_is_measured_exactly(seconds, executions, watts):
    if seconds * executions > 0.3:
        executions = 1
    trial = run(FakeBoard(busy_w=watts), seconds, executions=executions)
    assert trial.valid
    assert trial.latency_s == pytest.approx(seconds, rel=1e-6)
    assert trial.power_w == pytest.approx(watts, rel=0.01)
    assert trial.latency_rel_se < 1e-6
    assert abs(trial.power_w / watts - 1) <= 2 * trial.power_rel_se
    assert trial.clock_hz == 1.98e9
    assert trial.temperature_c == 50.0
    assert trial.flags == ()


def test_the_window_holds_six_ticks_and_three_quarters_of_a_second():
    trial = run(FakeBoard())
    assert trial.ticks >= 6
    assert 0.75 <= trial.window_s < 0.95


def test_a_slow_counter_makes_the_window_longer_but_never_endless():
    board = FakeBoard(has_instant=False)
    trial = run(board, limits=TrialLimits(power_limit_w=700.0, min_ticks=12))
    assert trial.ticks >= 12
    assert 1.1 <= trial.window_s < 1.5
    assert run(board, limits=TrialLimits(min_ticks=500)).window_s < 2.6


def test_without_a_counter_instant_power_stands_in():
    trial = run(FakeBoard(busy_w=321.0, has_counter=False))
    assert trial.valid
    assert trial.power_w == pytest.approx(321.0)


def test_without_any_sensor_power_is_none_with_a_reason_and_no_retry():
    board = FakeBoard(has_counter=False, has_instant=False)
    trial = run(board)
    assert trial.power_w is None
    assert trial.power_rel_se is None
    assert trial.latency_s == pytest.approx(2e-4)
    assert not trial.valid
    assert "no power samples" in trial.reason
    assert board.pauses == []


def test_a_load_at_the_power_limit_settles_longer_and_is_labelled_not_refused():
    # The limiter needs 0.6 s to find its clock; until then power overshoots and work is faster.
    def settled(t: float) -> bool:
        return t > 1000.7

    board = FakeBoard(
        busy_w=lambda t: 698.0 if settled(t) else 750.0,
        pace=lambda t: 1.0 if settled(t) else 0.9,
        reasons=lambda t: 0x4,
        clock_hz=lambda t: 1.45e9 if settled(t) else 1.9e9,
    )
    trial = run(board)
    assert trial.valid
    assert trial.flags == ("power_capped",)
    assert trial.latency_s == pytest.approx(2e-4, rel=1e-6)
    assert trial.power_w == pytest.approx(698.0, rel=0.005)
    assert trial.window_s >= 1.0


def test_power_at_the_limit_is_capped_even_where_no_reason_is_given():
    trial = run(FakeBoard(busy_w=680.0))
    assert trial.valid
    assert trial.flags == ("power_capped",)


def test_a_load_below_the_limit_settles_briefly():
    board = FakeBoard(busy_w=500.0)
    run(board)
    assert board.time_s - 1000.0 < 1.4


def test_a_slow_down_is_repeated_after_a_pause_and_then_counts():
    board = FakeBoard(reasons=lambda t: 0x40 if t < 1003.0 else 0)
    trial = run(board)
    assert trial.valid
    assert trial.flags == ()
    assert board.pauses == [5.0]


def test_a_lasting_slow_down_is_invalid_after_two_retries_and_names_the_event():
    board = FakeBoard(reasons=lambda t: 0x8)
    trial = run(board)
    assert not trial.valid
    assert "hw_slowdown" in trial.reason
    assert board.pauses == [5.0, 5.0]


def test_a_clock_that_falls_without_a_power_cap_is_invalid():
    board = FakeBoard(clock_hz=lambda t: 1.98e9 if int(t / 0.4) % 2 else 1.2e9)
    trial = run(board)
    assert not trial.valid
    assert "throttled" in trial.reason
    assert "at least 1200 MHz" in trial.reason


def test_a_pace_that_drifts_is_labelled_and_carries_a_wider_error():
    # A board that heats up: 15 % slower within a second.
    board = FakeBoard(pace=lambda t: 1 + 0.15 * (t - 1000.0))
    trial = run(board)
    assert "not_steady" in trial.flags
    assert trial.latency_rel_se > 0.02


def test_a_work_longer_than_a_chunk_still_gives_several_stamps():
    trial = run(FakeBoard(), seconds=0.2, executions=1)
    assert trial.window_s >= 1.2
    assert trial.latency_s == pytest.approx(0.2)
