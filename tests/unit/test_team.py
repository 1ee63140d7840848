from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from fake_board import FakeBoard, FakeClock, FakeMeter, FakeProvider, FakeWork

from energylens.bench.team import measure_collectives, over_boards, without_filler
from energylens.bench.trial import HostPoint, MixPoint, measure
from energylens.errors import UnsupportedError
from energylens.graph import make_op
from energylens.spec.system import Mode
from energylens.store import Store, Trial, board_hash

OPS = tuple(make_op("all_reduce", values=2**n, workers=2) for n in range(10, 14))


class FakeTeam:
    """Two workers in lockstep, seen from worker 0; worker 1 says the same of its own board."""

    worker, workers = 0, 2

    def __init__(self, boards):
        self.boards = boards
        self.orders: list[Any] = []

    def tell(self, order: Any) -> Any:
        self.orders.append(order)
        return order

    def gather(self, value: Any) -> list[Any]:
        if isinstance(value, float):
            return [value, None]
        other = replace(
            value,
            uuid=self.boards[1].uuid,
            anchor=replace(value.anchor, board_uuid=board_hash(self.boards[1].uuid)),
        )
        return [value, other]


class FakeRig:
    """Collectives of 1 ms on both boards."""

    def __init__(self, boards):
        self.boards = boards
        self.provider = FakeProvider(boards[0])
        self.ran: list[Any] = []

    def ops(self):
        return OPS

    def work(self, op):
        self.ran.append(op)
        return FakeWork(*self.boards, seconds=1e-3)

    def measure(self, work, recorder, uuids, limits):
        start = recorder.now()
        trial = measure(work, recorder, uuids[0], limits=limits)
        end = recorder.now()
        return trial, [recorder.reading(u, start + 0.3, end - 0.1) for u in uuids]

    def spin(self, seconds):
        start = self.boards[0].now()
        self.boards[0].advance(self.boards[0].queue(seconds, 150.0))
        return start

    def filler(self):
        return FakeWork(*self.boards, seconds=0.25e-3)

    def mix_points(self, spec):
        return ()

    def overlap_points(self):
        alone = make_op("limited_all_reduce", values=2**20, workers=2, sms=4)
        sizes = {"values": 2**20, "workers": 2, "sms": 4, "chunks": 2, "m": 256, "n": 4096, "k": 64}
        both = (
            make_op("gemm", m=128, n=4096, k=64, count=2),
            make_op("overlapped_all_reduce", **sizes),
        )
        for ops in ((alone,), both):
            build = partial(self.work, ops[-1])
            yield MixPoint(label=ops[-1].name, ops=ops, mode=Mode.CUDA_GRAPH, build=build)

    def host_points(self, spec):
        start = self.boards[0].now()
        self.boards[0].advance(self.boards[0].queue(1.0, 155.0))
        yield HostPoint(
            label=spec.name,
            ops=OPS[:1],
            step_s=3e-3,
            spread=0.1,
            start_s=start,
            end_s=self.boards[0].now(),
        )


@pytest.fixture
def lab():
    clock = FakeClock()
    return [
        FakeBoard("GPU-0", clock=clock, busy_w=300.0, idle_w=120.0),
        FakeBoard("GPU-1", clock=clock, busy_w=340.0, idle_w=120.0),
    ]


def collect(lab, folder, *, rig=None, **changes):
    rig = rig or FakeRig(lab)
    arguments = {"node": "n", "seed": 0, "specs": ["llama3_8b"], "minutes": 60.0}
    arguments["blocks"] = ["collectives"]
    arguments |= changes
    team = FakeTeam(lab)
    measure_collectives(
        team,
        rig,
        FakeMeter(*lab),
        out=folder,
        clock=lab[0].now,
        sleep=lab[0].sleep,
        **arguments,
    )
    return rig


def test_a_collective_is_stored_with_the_mean_power_of_its_boards(lab, tmp_path):
    collect(lab, tmp_path)
    store = Store(tmp_path)
    ops = [s for s in store.samples if s.block == "op"]
    assert {s.op for s in ops} == set(OPS)
    boards = f"{board_hash('GPU-0')};{board_hash('GPU-1')}"
    for sample in ops:
        assert sample.board_uuid == boards
        assert sample.usable
        assert sample.trial.latency_s == pytest.approx(0.75e-3)  # 1 ms, less 0.25 ms of filler
        assert sample.trial.power_w == pytest.approx(320.0, rel=0.01)
    (run,) = store.runs.values()
    assert len(run.anchors.boards) == 2
    assert set(run.boards) == {board_hash("GPU-0"), board_hash("GPU-1")}
    assert run.anchors.host.launch_us == 3.0


def test_overlaps_are_stored_and_what_they_are_made_of_as_ops(lab, tmp_path):
    collect(lab, tmp_path, blocks=["overlaps"])
    alone, both = Store(tmp_path).samples
    assert (alone.block, alone.op.kernel) == ("op", "limited_all_reduce")
    assert both.block == "overlap"
    assert [op.kernel for op in both.ops] == ["gemm", "overlapped_all_reduce"]
    assert both.usable
    assert both.trial.latency_s == pytest.approx(1e-3)
    assert both.trial.power_w == pytest.approx(320.0, rel=0.01)
    rig = collect(lab, tmp_path, blocks=["overlaps"])
    assert not rig.ran  # both were there


def test_a_worker_that_spins_and_the_host_times_of_sharded_models_are_measured(lab, tmp_path):
    collect(lab, tmp_path)
    samples = Store(tmp_path).samples
    (spin,) = (s for s in samples if s.block == "idle")
    assert spin.label == "spin"
    assert spin.board_uuid == board_hash("GPU-0")
    assert spin.trial.power_w == pytest.approx(150.0, rel=0.01)
    (host,) = (s for s in samples if s.block == "host")
    assert host.trial.latency_s == 3e-3
    assert host.trial.power_w == pytest.approx((155.0 + 120.0) / 2, rel=0.01)


def test_a_resumed_team_measures_what_is_left(lab, tmp_path):
    collect(lab, tmp_path, minutes=0.35)
    done = sum(s.block == "op" for s in Store(tmp_path).samples)
    assert 0 < done < len(OPS)
    rig = collect(lab, tmp_path)
    assert len(rig.ran) == len(OPS) - done
    ops = [s.key for s in Store(tmp_path).samples if s.block == "op"]
    assert len(set(ops)) == len(ops) == len(OPS)


def test_a_fresh_team_measures_everything_again(lab, tmp_path):
    collect(lab, tmp_path)
    rig = collect(lab, tmp_path, resume=False)
    assert len(rig.ran) == len(OPS)
    assert sum(s.block == "op" for s in Store(tmp_path).samples) == 2 * len(OPS)


def test_a_model_that_cannot_be_sharded_is_skipped_with_its_reason(lab, tmp_path):
    class Rig(FakeRig):
        def host_points(self, spec):
            raise UnsupportedError("2 does not divide its heads")

    collect(lab, tmp_path, rig=Rig(lab))
    (host,) = (s for s in Store(tmp_path).samples if s.block == "host")
    assert host.trial is None
    assert host.reason == "2 does not divide its heads"


def test_one_board_without_power_leaves_the_mean_open(lab, tmp_path):
    lab[1].has_counter = lab[1].has_instant = False
    collect(lab, tmp_path)
    ops = [s for s in Store(tmp_path).samples if s.block == "op"]
    assert all(s.trial.power_w is None and not s.usable for s in ops)
    assert all(s.trial.reason for s in ops)


def test_the_mean_over_boards_is_valid_where_all_are(lab):
    board = lab[0]
    board.advance(board.queue(3.0))
    good = board.reading("GPU-0", 1000.5, 1002.5)
    trial = measure(FakeWork(board, seconds=1e-3), board, "GPU-0", sleep=board.sleep)
    bad = replace(good, valid=False, flags=("throttled",))
    both = over_boards(trial, [good, bad])
    assert not both.valid
    assert both.reason == "throttled"
    assert over_boards(trial, [good, good]).valid


PAIR = Trial(
    latency_s=30e-6,
    latency_rel_se=0.01,
    power_w=400.0,
    power_rel_se=0.025,
    clock_hz=1.9e9,
    clock_min_hz=1.8e9,
    temperature_c=50.0,
    ticks=9,
    window_s=1.0,
    instant_power_w=401.0,
    flags=("gpu_idle",),
)
FILLER = replace(PAIR, latency_s=20e-6, latency_rel_se=0.02, power_w=500.0, power_rel_se=0.04)


def test_a_collective_is_what_is_left_beside_its_filler() -> None:
    alone = without_filler(PAIR, FILLER)
    assert alone.latency_s == pytest.approx(10e-6)
    assert alone.power_w == pytest.approx(200.0)  # (12 - 10) mJ over 10 us
    assert alone.latency_rel_se == pytest.approx(0.05)  # 0.3 and 0.4 us of 10 us
    assert alone.power_rel_se == pytest.approx(0.25)  # 0.3 and 0.4 mJ of 2 mJ
    assert alone.instant_power_w is None
    assert (alone.valid, alone.flags, alone.clock_hz) == (True, ("gpu_idle",), 1.9e9)


@pytest.mark.parametrize("latency_s", [20e-6, 19e-6])
def test_a_collective_that_took_no_time_is_not_valid(latency_s) -> None:
    alone = without_filler(replace(PAIR, latency_s=latency_s), FILLER)
    assert not alone.valid
    assert alone.reason == "the collective took no time beside its filler; measure it again"


@pytest.mark.parametrize(
    ("pair_w", "filler_w"),
    [(None, 500.0), (400.0, None), (300.0, 500.0)],  # the last: 9 mJ with, 10 mJ without
)
def test_power_that_cannot_be_told_apart_is_missing_and_not_zero(pair_w, filler_w) -> None:
    alone = without_filler(replace(PAIR, power_w=pair_w), replace(FILLER, power_w=filler_w))
    assert (alone.power_w, alone.power_rel_se) == (None, None)
    assert alone.latency_s == pytest.approx(10e-6)
    assert alone.valid
