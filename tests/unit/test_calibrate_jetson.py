"""Calibrating a Jetson: the real meter on replayed rails, time that passes by waiting only."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import helpers_jetson
import pytest
from fake_board import FakeBoard, FakeProvider
from fake_orin import FakeOrin
from helpers_jetson import FakeJtop, Tree
from helpers_nvml import Clock
from rich.console import Console

from energylens.anchors import load_anchors
from energylens.bench.anchor import Session
from energylens.bench.calibrate import Machine, run
from energylens.bench.trial import TrialLimits
from energylens.cost.bundle import load_bundle
from energylens.errors import CalibrationError, MeterError, UnsupportedError
from energylens.fit.samples import gather
from energylens.meter.jetson import JetsonMeter
from energylens.predict import machine
from energylens.spec.machines import load_device
from energylens.spec.resources import data_dir
from energylens.store import Store, board_hash

PLAN = """\
schema: energylens/plan/v1
name: small
points:
- {kernel: gemm, grid: {m: [1, 2, 4], "n, k": [[64, 64]]}}
- {kernel: hf_add, grid: {rows: [1], width: [64]}}
"""


class Orin(FakeOrin):
    """An Orin Nano that draws what its work does, and a plan to calibrate it with."""

    def __init__(self, tmp_path: Path) -> None:
        super().__init__(tmp_path / "board")
        self.provider = FakeProvider(self.board)
        self.provider.anchor_work = self._anchor_work  # type: ignore[method-assign]
        self.provider.launching = self._launching  # type: ignore[method-assign]
        self.out = tmp_path / "out"
        self.plan = tmp_path / "plan.yaml"
        self.plan.write_text(PLAN)

    def _anchor_work(self, name: str) -> Any:
        load = FakeProvider.anchor_work(self.provider, name)
        load.work.watts = {"stream": 9.0, "gemm": 13.0, "gemv": 8.5}[name]
        return load

    def _launching(self, seconds: float) -> None:
        self.clock.time_s = self.board.queue(seconds, 5.0)

    def run(self, **changes: Any) -> Mapping[str, Any]:
        meter = self.meter()
        bench = Machine(
            meter=lambda: meter,
            provider=lambda name, ordinal: self.provider,
            sleep=self.board.sleep,
            environment={},
        )
        arguments = {"plan": self.plan, "out": self.out, "machine": bench, "blocks": ["ops"]}
        return run(**(arguments | changes), console=Console(file=io.StringIO()))

    def store(self, device: str = "jetson_orin_nano") -> Store:
        return Store(self.out / "samples" / device / board_hash("JETSON-1424223005461"))


@pytest.fixture
def orin(tmp_path: Path) -> Orin:
    return Orin(tmp_path)


def test_points_are_measured_in_windows_that_a_slow_sensor_can_see(orin: Orin) -> None:
    document = orin.run()
    assert document["device"] == "jetson_orin_nano"
    ops = [s for s in orin.store() if s.block == "op"]
    assert len(ops) == 4
    for sample in ops:
        assert sample.usable
        assert sample.trial is not None
        assert 30 <= sample.trial.window_s < 31
        assert sample.trial.latency_s == pytest.approx(1e-3)
        assert sample.trial.power_w == pytest.approx(10.0, rel=1e-3)
        assert sample.trial.ticks >= 60
        # Half of the sensor's resolution, 40 mW, is the least that the error can be.
        assert sample.trial.power_rel_se >= 0.04 / 10 / math.sqrt(3)


def test_the_record_tells_shared_rails_from_the_gpus_and_names_mode_clocks_and_sensor(
    orin: Orin,
) -> None:
    document = orin.run()
    (provenance,) = orin.store().runs.values()
    assert provenance.power_mode == "15W"
    assert provenance.power_limit_w is None  # a mode is no cap
    (facts,) = provenance.boards.values()
    assert facts["power_scope"] == "module"
    assert facts["power_source"] == "power monitors in sysfs, every 0.05 s"
    assert facts["power_step_w"] == pytest.approx(0.04)
    assert facts["clocks_hz"]["gpu_max"] == 612e6
    assert facts["rails"]["total"]["rails"] == ["VDD_IN"]
    assert facts["rails"]["gpu"]["rails"] == ["VDD_CPU_GPU_CV"]
    assert facts["rails"]["gpu"]["shared_with"] == ["cpu", "cv"]
    assert facts["rails"]["memory"]["rails"] == []
    assert "no rail of this board measures the memory" in facts["rails"]["memory"]["reason"]
    assert any("not run on hardware" in note for note in facts["notes"])
    assert any("not run on hardware" in note for note in document["boards"][0]["notes"])
    assert not any("1424223005461" in p.read_text() for p in orin.out.rglob("*.*"))
    json.dumps(document, allow_nan=False)


def test_the_anchor_of_a_jetson_takes_minutes_and_holds_module_power(orin: Orin) -> None:
    document = orin.run(anchor=True)
    (board,) = load_anchors(Path(document["anchors"][0])).boards
    assert board.device == "jetson_orin_nano"
    assert board.idle_w == pytest.approx(4.0, rel=0.01)
    assert board.stream_w == pytest.approx(9.0, rel=0.01)
    assert board.gemm_w == pytest.approx(13.0, rel=0.01)
    assert 150 < orin.clock.time_s - 1000 < 200


def test_each_power_mode_has_samples_of_its_own(orin: Orin) -> None:
    folders: list[list[Path]] = []

    def fit(paths: Sequence[Path], device: Any, provider: str, bundle: Path) -> Mapping[str, Any]:
        folders.append(list(paths))
        return {"device": device.name, "bundle": bundle.name}

    orin.run(fit=fit)
    orin.tree.power_mode(1, ("15W", "25W"))
    orin.tree.gpu(high=918e6, cur=918e6)
    document = orin.run(fit=fit)
    assert document["device"] == "jetson_orin_nano@25W"
    assert document["bundle"] == str(orin.out / "bundles" / "jetson_orin_nano@25W" / "torch.json")
    assert [len(paths) for paths in folders] == [1, 1]
    assert folders[0] != folders[1]
    (provenance,) = orin.store("jetson_orin_nano@25W").runs.values()
    assert (provenance.device, provenance.power_mode) == ("jetson_orin_nano@25W", "25W")
    assert orin.store().runs  # those of 15 W are still there


def test_runs_of_two_modes_are_never_mixed(orin: Orin) -> None:
    orin.run(anchor=True)
    store = orin.store()
    (first,) = store.runs.values()
    with pytest.raises(CalibrationError, match=r"in power mode 15W and run other in 25W"):
        store.begin(replace(first, run_id="other", power_mode="25W"))


@pytest.mark.parametrize(
    ("device", "said"),
    [
        (None, r"jetson_orin_nano: the board is in power mode 7W, .* 15W, 25W, MAXN_SUPER"),
        ("jetson_orin_nano@25W", r"jetson_orin_nano@25W: .* 7W"),
    ],
)
def test_a_mode_without_figures_is_refused(orin: Orin, device: str | None, said: str) -> None:
    orin.tree.power_mode(1)
    with pytest.raises(UnsupportedError, match=said):
        orin.run(device=device)
    assert not orin.out.exists()


def test_another_mode_than_asked_for_is_refused(orin: Orin) -> None:
    with pytest.raises(
        UnsupportedError, match=r"in power mode 15W, asked for jetson_orin_nano@25W"
    ):
        orin.run(device="jetson_orin_nano@25W")
    orin.tree.power_mode(1, ("15W", "25W"))
    with pytest.raises(
        UnsupportedError, match=r"leave --device out to calibrate jetson_orin_nano@"
    ):
        orin.run(device="jetson_orin_nano")
    assert orin.run(device="jetson_orin_nano@25w", anchor=True)["device"] == "jetson_orin_nano@25W"


def test_a_mode_that_is_not_known_is_refused(orin: Orin) -> None:
    (orin.tree.root / "var/lib/nvpmodel/status").unlink()
    with pytest.raises(UnsupportedError, match="power mode of the board is not known"):
        orin.run()


def test_the_time_that_is_given_is_kept(orin: Orin) -> None:
    orin.plan.write_text(PLAN.replace("[1, 2, 4]", str(list(range(1, 40)))))
    document = orin.run(minutes=20)
    (report,) = document["boards"]
    assert report["left"] > 0
    assert report["seconds"] < 20 * 60
    assert len([s for s in orin.store() if s.block == "op"]) > 5


def test_throttling_by_over_current_is_kept_as_invalid_with_its_reason(orin: Orin) -> None:
    counts = iter(range(10_000))
    orin.tree.over_current(0)
    draw = orin._draw

    def draw_too_much(t: float) -> None:
        draw(t)
        if t > 1170:  # after the anchor
            orin.tree.over_current(next(counts))

    orin._draw = draw_too_much  # type: ignore[method-assign]
    with pytest.raises(MeterError, match="throttled, hw_power_brake"):
        orin.run()


def test_limits_follow_the_sensor() -> None:
    fast, slow = TrialLimits(), TrialLimits().at_least(30.0)
    assert fast.at_least(0.0) is fast
    assert (slow.settle_s, slow.window_s, slow.max_window_s) == (5.0, 30.0, 60.0)
    board = FakeBoard()
    session = Session(recorder=board, uuid=board.uuid, device="x", power_limit_w=None)
    assert session.limits.stretch == 1.0
    assert replace(session, least_window_s=30.0).limits.stretch == pytest.approx(35.0)


def test_b69_the_name_of_a_mode_is_no_cap_of_what_was_measured() -> None:
    bundle = load_bundle(data_dir("calibration") / "bundles" / "h200" / "torch.json")
    orin = load_device("jetson_orin_nano")
    assert machine(orin, workers=1, bundle=bundle, anchors=None).cap_w == math.inf
    limited = machine(orin, workers=1, bundle=bundle, anchors=None, power_limit_w=10.0)
    assert limited.cap_w < 10.0
    assert machine(orin, workers=1, bundle=None, anchors=None).cap_w < orin.power_limit_w
    h200 = load_device("h200")
    assert machine(h200, workers=1, bundle=bundle, anchors=None).cap_w < 700.0


def test_b69_samples_above_the_watts_of_the_mode_are_not_taken_for_capped(orin: Orin) -> None:
    orin.board.busy_w = lambda t: 18.0
    orin.run()
    data, skipped = gather([orin.store()], load_device("jetson_orin_nano"), "torch")
    assert data.limit_w == math.inf
    assert not skipped
    watts = [s.trial.power_w for group in data.ops.values() for s in group if s.trial]
    assert watts == pytest.approx([18.0] * 4, rel=1e-3)


def test_the_rails_of_agx_orin_add_up_in_the_record(tmp_path: Path) -> None:
    tree = Tree(tmp_path, model="NVIDIA Jetson AGX Orin Developer Kit")
    tree.ina3221(helpers_jetson.AGX_ORIN)
    jtop = FakeJtop({}, clock=Clock(), error="not active")
    (info,) = JetsonMeter(tree.root, jtop=jtop).devices()
    total, gpu = info.rails[0], info.rails[1]
    assert total.rails == ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0")
    assert (gpu.rails, gpu.shared_with) == (("VDD_GPU_SOC",), ("soc",))
