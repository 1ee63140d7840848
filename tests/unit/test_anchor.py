import json

import pytest
from fake_board import FakeBoard, FakeProvider

from energylens.anchors import (
    anchors_from_json,
    anchors_to_json,
    load_anchors,
    merge_anchors,
    save_anchors,
)
from energylens.bench.anchor import Session, measure_anchor, measure_launching, recheck
from energylens.errors import MeterError, SpecError
from energylens.results import Anchors, BoardAnchor, HostAnchor
from energylens.store import board_hash


def session(board: FakeBoard) -> Session:
    return Session(
        recorder=board, uuid=board.uuid, device="h200", power_limit_w=700.0, sleep=board.sleep
    )


def test_an_anchor_holds_what_the_board_does_under_each_load():
    board = FakeBoard(idle_w=121.0)
    provider = FakeProvider(board)
    anchor = measure_anchor(provider, session(board), time="2026-11-30T10:00:00+00:00")
    assert anchor.board_uuid == board_hash(board.uuid)
    assert anchor.device == "h200"
    assert anchor.idle_w == pytest.approx(121.0)
    assert anchor.stream_w == pytest.approx(640.0, rel=0.01)
    assert anchor.stream_gbs == pytest.approx(2e9 / 5e-4 / 1e9)
    assert anchor.gemv_w == pytest.approx(600.0, rel=0.01)
    assert anchor.gemv_gbs == pytest.approx(2e8 / 5e-5 / 1e9)
    assert anchor.gemm_w == pytest.approx(690.0, rel=0.01)
    assert anchor.gemm_tflops == pytest.approx(650.0)
    assert anchor.gemm_mhz == pytest.approx(1980.0)
    assert all(work.closed for work in provider.works)
    assert board.time_s - 1000.0 < 20


def test_a_board_is_woken_and_then_left_idle_for_three_seconds():
    # A board without a context sleeps at two thirds of its idle power: steps do not stand on that.
    board = FakeBoard()
    seen = []
    board.sleep = lambda seconds: (seen.append(seconds), board.advance(board.time_s + seconds))  # type: ignore[method-assign,assignment]
    measure_anchor(FakeProvider(board), session(board), time="")
    assert seen[0] >= 3.0
    woken, first_load = board.busy[0], board.busy[1]
    assert woken[1] <= 1000.0 + 1.0
    assert first_load[0] >= woken[1] + seen[0]


def test_without_power_there_is_no_anchor():
    board = FakeBoard(has_counter=False, has_instant=False)
    with pytest.raises(MeterError, match="no valid power"):
        measure_anchor(FakeProvider(board), session(board), time="")


def test_a_counter_that_is_off_is_not_trusted_any_more():
    board = FakeBoard(counter_gain=0.6, idle_w=100.0)
    anchor = measure_anchor(FakeProvider(board), session(board), time="")
    assert anchor.idle_w == pytest.approx(100.0, rel=0.01)
    assert anchor.stream_w == pytest.approx(640.0, rel=0.01)
    assert anchor.gemm_w == pytest.approx(690.0, rel=0.01)


def test_waiting_for_the_host_draws_its_own_power():
    board = FakeBoard(idle_w=100.0)
    trial = measure_launching(FakeProvider(board), session(board))
    assert trial.power_w == pytest.approx(130.0)


def test_a_second_look_tells_how_far_the_board_moved():
    board = FakeBoard(idle_w=100.0)
    anchor = measure_anchor(FakeProvider(board), session(board), time="")
    assert recheck(FakeProvider(board), session(board), anchor).drift.largest < 0.01
    board.idle_w = 110.0
    drift = recheck(FakeProvider(board), session(board), anchor).drift
    assert drift.idle_w == pytest.approx(0.1, abs=0.01)
    assert drift.largest == drift.idle_w


BOARD = BoardAnchor(
    board_uuid="dca3955ee6",
    device="h200",
    idle_w=129.3,
    stream_w=673.2,
    gemm_tflops=649.5,
    gemm_w=691.6,
    gemm_mhz=1430.0,
    gemv_gbs=4241.0,
)
ANCHORS = Anchors(boards=(BOARD,), host=HostAnchor(launch_us=3.1, module_us=41.0, cpu="cpu"))


def test_anchors_survive_a_file(tmp_path):
    path = tmp_path / "new" / "anchor.json"
    save_anchors(ANCHORS, path)
    assert load_anchors(path) == ANCHORS
    document = json.loads(path.read_text())
    assert document["schema"] == "energylens/anchor/v1"
    assert document["boards"][0]["stream_gbs"] is None
    assert [p.name for p in path.parent.iterdir()] == ["anchor.json"]


def test_several_files_merge_and_the_last_word_on_a_board_counts(tmp_path):
    from dataclasses import replace

    newer = replace(BOARD, idle_w=125.0)
    other = replace(BOARD, board_uuid="other")
    paths = [tmp_path / f"{i}.json" for i in range(3)]
    save_anchors(ANCHORS, paths[0])
    save_anchors(Anchors(boards=(other,)), paths[1])
    save_anchors(Anchors(boards=(newer,)), paths[2])
    merged = load_anchors(*paths)
    assert merged.boards == (other, newer)
    assert merged.host == ANCHORS.host
    assert merge_anchors([]) == Anchors()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"idle_w": None}, r"boards\[0\].idle_w is missing"),
        ({"idle_w": 0}, r"boards\[0\].idle_w is 0, and must be a positive number"),
        ({"idle_w": "120"}, r"boards\[0\].idle_w is '120'"),
        ({"gemm_w": float("nan")}, "gemm_w is nan"),
        ({"gemv_gbs": -1}, "gemv_gbs is -1"),
        ({"idle_w": 700.0}, "must be above idle_w"),
        ({"board_uuid": ""}, "board_uuid is missing"),
        ({"device": 3}, "device is 3"),
        ({"idle": 3}, "unknown field 'idle'"),
    ],
)
def test_a_wrong_field_of_a_board_is_named(change, says):
    document = anchors_to_json(ANCHORS)
    document["boards"][0] |= change
    with pytest.raises(SpecError, match=says):
        anchors_from_json(document, where="a.json")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "must be an object"),
        ("{}", "schema is None"),
        ('{"schema": "energylens/anchor/v1", "boards": {}}', "boards must be a list"),
        ('{"schema": "energylens/anchor/v1", "boards": [3]}', r"boards\[0\]: must be an object"),
        ('{"schema": "energylens/anchor/v1", "host": {}}', "host.launch_us is missing"),
        ('{"schema": "energylens/anchor/v1", "hosts": []}', "unknown field 'hosts'"),
    ],
)
def test_a_broken_file_says_what_is_wrong(tmp_path, text, says):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(SpecError, match=says):
        load_anchors(path)


def test_a_missing_file_says_how_to_make_one(tmp_path):
    with pytest.raises(SpecError, match="calibrate --anchor"):
        load_anchors(tmp_path / "none.json")
    with pytest.raises(SpecError, match="cannot be read"):
        load_anchors(tmp_path)
