"""RAPL counters of a machine, in files laid out as ``powercap.rst`` of the Linux kernel says."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers_nvml import Clock
from hypothesis import given
from hypothesis import strategies as st

from energylens.errors import MeterError
from energylens.meter.base import DeviceSeries, Reading, reading
from energylens.meter.host import HostMeter, HostReading, machine_energy_j

RANGE_UJ = 262_143_328_850


class Rapl:
    """The powercap folder of a machine with one package and its memory."""

    def __init__(self, root: Path, *, range_uj: int | None = RANGE_UJ) -> None:
        self.root, self.clock = root, Clock()
        (root / "etc").mkdir(parents=True)
        (root / "etc/machine-id").write_text("8f2c\n")
        self.folder = root / "sys/class/powercap"
        names = {"intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:0:1": "dram"}
        for path, name in names.items():
            (self.folder / path).mkdir(parents=True)
            (self.folder / path / "name").write_text(name + "\n")
            if range_uj is not None:
                (self.folder / path / "max_energy_range_uj").write_text(f"{range_uj}\n")
        self.set(0)

    def set(self, microjoules: int) -> None:
        for path in self.folder.iterdir():
            (path / "energy_uj").write_text(f"{microjoules}\n")

    def meter(self) -> HostMeter:
        return HostMeter(self.root, clock=self.clock)


def rise(rapl: Rapl, *values: int, seconds: float = 10.0) -> tuple[HostReading, ...]:
    """What the meter says of a counter that showed these values."""
    meter, snapshots = rapl.meter(), []
    for value in values:
        rapl.set(value)
        snapshots.append(meter.read())
        rapl.clock.sleep(seconds)
    return meter.energy(snapshots)


def board(watts: float, *, scope: str) -> Reading:
    power = tuple((t / 10, watts) for t in range(200))
    return reading(DeviceSeries(uuid="GPU-1", instant_power=power, scope=scope), 1, 2)


def test_packages_and_memory_are_counted_and_not_the_parts_of_a_package(tmp_path: Path) -> None:
    package, memory = rise(Rapl(tmp_path), 1_000_000, 6_000_000)
    assert (package.scope, memory.scope) == ("cpu_pkg", "dram")
    assert package.energy_j == memory.energy_j == pytest.approx(5.0)


def test_b23_a_counter_that_starts_anew_is_followed(tmp_path: Path) -> None:
    package, _ = rise(Rapl(tmp_path), RANGE_UJ - 1_000_000, 2_000_000)
    assert package.energy_j == pytest.approx(3.0)


def test_one_look_is_no_window_and_no_zero(tmp_path: Path) -> None:
    with pytest.raises(MeterError, match="needs two snapshots; 1 found"):
        rise(Rapl(tmp_path), 1_000_000)


def test_b24_without_its_range_a_counter_that_fell_gives_no_energy(tmp_path: Path) -> None:
    package, _ = rise(Rapl(tmp_path, range_uj=None), 9_000_000, 2_000_000)
    assert package.energy_j is None
    assert "went backwards, and its range cannot be read" in (package.reason or "")
    again, _ = rise(Rapl(tmp_path / "x", range_uj=None), 2_000_000, 9_000_000)
    assert again.energy_j == pytest.approx(7.0)


def test_a_window_in_which_it_may_start_anew_twice_needs_looks_in_between(tmp_path: Path) -> None:
    rapl = Rapl(tmp_path)
    seldom, _ = rise(rapl, 0, 1_000_000, seconds=300.0)
    assert "more than once" in (seldom.reason or "")
    often, _ = rise(rapl, 0, 200_000_000_000, 90_000_000_000, seconds=200.0)
    assert often.energy_j == pytest.approx(90_000 + RANGE_UJ / 1e6)


@given(
    steps=st.lists(st.integers(0, RANGE_UJ - 1), min_size=1, max_size=8), start=st.integers(0, 9)
)
def test_any_course_of_a_counter_adds_up(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], start: int
) -> None:
    values = [start]
    for step in steps:
        values.append((values[-1] + step) % RANGE_UJ)
    package, _ = rise(Rapl(tmp_path_factory.mktemp("rapl")), *values)
    assert package.energy_j == pytest.approx(sum(steps) / 1e6)


def test_without_permission_there_is_a_reason_and_no_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rapl = Rapl(tmp_path)
    read_text = Path.read_text

    def denied(path: Path, *arguments: object, **more: object) -> str:
        if path.name == "energy_uj":
            raise PermissionError
        return read_text(path, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", denied)  # root may read whatever the mode says
    meter = rapl.meter()
    package, _ = meter.energy([meter.read(), meter.read()])
    assert package.energy_j is None
    assert "no permission" in (package.reason or "")
    assert {c.state for c in meter.capabilities()} == {"no_permission"}
    assert machine_energy_j([], [package]) == (None, package.reason)


def test_a_machine_without_rapl_has_no_counter(tmp_path: Path) -> None:
    meter = HostMeter(tmp_path)
    assert meter.energy([meter.read(), meter.read()]) == ()
    assert meter.capabilities() == ()


def test_b38_four_processes_of_a_machine_count_its_cpu_once(tmp_path: Path) -> None:
    hosts = [one for _ in range(4) for one in rise(Rapl(tmp_path / str(_)), 0, 50_000_000)]
    (other,) = (HostReading(sensor="other/package-0", scope="cpu_pkg", energy_j=7.0),)
    total_j, reason = machine_energy_j([board(300, scope="gpu")], [*hosts, other])
    assert reason is None
    assert total_j == pytest.approx(300 + 50 + 50 + 7)


def test_b6_a_module_that_holds_its_cpu_does_not_get_it_twice() -> None:
    cpu = HostReading(sensor="x/package-0", scope="cpu_pkg", energy_j=100.0)
    assert machine_energy_j([board(450, scope="module")], [cpu]) == (pytest.approx(450.0), None)
    assert machine_energy_j([board(450, scope="gpu")], [cpu]) == (pytest.approx(550.0), None)


def test_a_board_without_energy_makes_the_sum_unknown() -> None:
    short = reading(DeviceSeries(uuid="GPU-1"), 1, 2)
    total_j, reason = machine_energy_j([short, board(300, scope="gpu")], [])
    assert total_j is None
    assert reason == short.reason
