"""Stand-ins for a Jetson: a file system as its kernel lays it out, and jetson-stats.

Files and units of the power monitors are those of ``Documentation/hwmon/ina3221.rst`` and
``ina238.rst`` of the Linux kernel (mV, mA, uOhm; power of the INA238 in uW); ``iio:device*`` with
``rail_name_N`` and mW is what Jetson Linux 32 and older show. Folders are linked as sysfs links
them, so that a monitor is seen through ``class/hwmon``, through ``bus/i2c/drivers`` and, where it
is an iio device, through ``bus/iio``. The power mode is in ``/var/lib/nvpmodel/status`` and
``/etc/nvpmodel.conf``, over-current events in the hwmon ``soctherm_oc``.

The answers of jtop have the form that the docstrings of ``jtop.power``, ``jtop.gpu`` and
``jtop.temperature`` in rbonghi/jetson_stats give. Nothing here was recorded on a board.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ORIN_NANO = {"VDD_IN": 8000.0, "VDD_CPU_GPU_CV": 4000.0, "VDD_SOC": 1500.0}
AGX_ORIN = {
    "VDD_GPU_SOC": 10000.0,
    "VDD_CPU_CV": 3000.0,
    "VIN_SYS_5V0": 4000.0,
    "NC": 0.0,
    "VDDQ_VDD2_1V8AO": 1500.0,
}
AGX_XAVIER = {
    "GPU": 9000.0,
    "CPU": 2000.0,
    "SOC": 3000.0,
    "CV": 100.0,
    "VDDRQ": 1200.0,
    "SYS5V": 2500.0,
}
NANO = {"POM_5V_IN": 5000.0, "POM_5V_GPU": 2000.0, "POM_5V_CPU": 1500.0}
TX2 = {
    "VDD_SYS_GPU": 4000.0,
    "VDD_SYS_SOC": 1000.0,
    "VDD_4V0_WIFI": 50.0,
    "VDD_IN": 9000.0,
    "VDD_SYS_CPU": 1500.0,
    "VDD_SYS_DDR": 1300.0,
}
THOR = {"VDD_GPU": 30000.0, "VDD_CPU_SOC_MSS": 12000.0, "VIN_SYS_5V0": 6000.0}
"""Rail -> milliwatts."""
MILLIVOLT = 5000.0


class Tree:
    """The files of a board below ``root``."""

    def __init__(
        self,
        root: Path,
        *,
        model: str | None = "NVIDIA Jetson Orin Nano Developer Kit",
        release: str | None = "# R36 (release), REVISION: 4.7, GCID: 1, BOARD: generic",
    ) -> None:
        self.root = root
        self._numbers = itertools.count()
        self.rails: dict[str, tuple[Path, str]] = {}
        if model is not None:
            self.write("proc/device-tree/model", model + "\0")
            self.write("proc/device-tree/serial-number", "1424223005461\0")
        if release is not None:
            self.write("etc/nv_tegra_release", release + "\n")

    def write(self, path: str | Path, text: object) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}")
        return file

    def link(self, path: str, target: Path) -> None:
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target, target_is_directory=True)

    def ina3221(self, rails: Mapping[str, float], *, micro_ohm: int | None = 5000) -> list[Path]:
        """Monitors of three channels each, as the kernel's driver shows them."""
        names = list(rails)
        chips = []
        for start in range(0, len(names), 3):
            chip = self._hwmon("ina3221")
            for n, name in enumerate(names[start : start + 3], 1):
                self.write(chip / f"in{n}_label", name + "\n")
                self.write(chip / f"in{n}_enable", "1\n")
                self.write(chip / f"in{n + 3}_input", "999\n")  # shunt voltage
                if micro_ohm is not None:
                    self.write(chip / f"shunt{n}_resistor", f"{micro_ohm}\n")
                self.rails[name] = (chip, f"in{n}_input curr{n}_input")
                self.set(name, rails[name])
            self.write(chip / "in7_label", "sum of shunt voltages\n")
            self.write(chip / "in7_input", "2997\n")
            self.write(chip / "curr4_input", "4242\n")
            chips.append(chip)
        return chips

    def ina238(self, milliwatt: float, *, label: str | None = None) -> Path:
        """A monitor of one channel; its power is in microwatts."""
        chip = self._hwmon("ina238")
        if label is not None:
            self.write(chip / "label", label + "\n")
        self.write(chip / "in0_input", "1\n")
        self.rails["VIN"] = (chip, "in1_input curr1_input power1_input")
        self.set("VIN", milliwatt)
        return chip

    def iio(self, rails: Mapping[str, float]) -> None:
        """Monitors as the driver ina3221x of Jetson Linux 32 shows them."""
        names = list(rails)
        for start in range(0, len(names), 3):
            n = start // 3
            client = f"sys/devices/3160000.i2c/i2c-0/0-004{n}"
            chip = self.root / client / f"iio:device{n}"
            self.write(chip / "name", "ina3221x\n")
            for k, name in enumerate(names[start : start + 3]):
                self.write(chip / f"rail_name_{k}", name + "\n")
                files = f"in_voltage{k}_input in_current{k}_input in_power{k}_input"
                self.rails[name] = (chip, files)
                self.set(name, rails[name])
            self._client(client, "ina3221x")
            self.link(f"sys/bus/iio/devices/iio:device{n}", chip)

    def _hwmon(self, kind: str) -> Path:
        number = next(self._numbers)
        address = f"1-00{40 + number}"
        client = f"sys/devices/platform/c240000.i2c/i2c-1/{address}"
        chip = self.root / client / "hwmon" / f"hwmon{number}"
        self.write(chip / "name", kind + "\n")
        self.link(f"sys/class/hwmon/hwmon{number}", chip)
        self._client(client, kind)
        return chip

    def _client(self, client: str, driver: str) -> None:
        """The I2C device that a monitor is, in the lists of devices and of its driver."""
        folder = self.root / client
        self.write(folder / "name", driver + "\n")
        self.link(f"sys/bus/i2c/devices/{folder.name}", folder)
        self.link(f"sys/bus/i2c/drivers/{driver}/{folder.name}", folder)

    def set(self, rail: str, milliwatt: float, *, millivolt: float = MILLIVOLT) -> float:
        """Let a rail draw so much; returns the watts that the files say, in whole mV and mA."""
        chip, files = self.rails[rail]
        milliampere = round(1000 * milliwatt / millivolt)
        volts, amperes, *power = files.split()
        self._put(chip / volts, round(millivolt))
        self._put(chip / amperes, milliampere)
        if power:
            unit = 1000 if power[0] == "power1_input" else 1
            self._put(chip / power[0], round(milliwatt * unit))
            return milliwatt / 1000
        return round(millivolt) * milliampere * 1e-6

    def _put(self, file: Path, number: int) -> None:
        """Overwrite in place: cutting a file short each time is slow on a real disk."""
        text = f"{number}\n"
        if not file.exists():
            self.write(file, text)
        elif file.read_text() != text:
            with file.open("r+") as there:
                there.write(f"{text:<12}")

    def gpu(self, *, cur: float = 612e6, low: float = 306e6, high: float = 612e6) -> Path:
        """The devfreq node of the GPU, with its load in thousandths."""
        node = self.root / "sys/class/devfreq/17000000.gpu"
        for name, hz in (("cur", cur), ("min", low), ("max", high)):
            self.write(node / f"{name}_freq", f"{hz:.0f}\n")
        self.write(node / "device/load", "990\n")
        self.write("sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq", "1510400\n")
        return node

    def temperature(self, celsius: float, kind: str = "gpu-thermal") -> Path:
        self.write("sys/class/thermal/thermal_zone0/type", "cpu-thermal\n")
        self.write("sys/class/thermal/thermal_zone0/temp", "41000\n")
        self.write("sys/class/thermal/thermal_zone1/type", kind + "\n")
        return self.write("sys/class/thermal/thermal_zone1/temp", f"{celsius * 1000:.0f}\n")

    def over_current(self, count: int) -> Path:
        chip = self.root / "sys/class/hwmon/hwmon9"
        self._put(chip / "oc1_event_cnt", 0)
        self._put(chip / "oc3_event_cnt", count)
        return self.write(chip / "name", "soctherm_oc\n") if not (chip / "name").exists() else chip

    def power_mode(self, number: int, names: Sequence[str] = ("15W", "7W")) -> None:
        self.write("var/lib/nvpmodel/status", f"pmode:{number:04d} fmode:quiet\n")
        table = "".join(
            f"< POWER_MODEL ID={n} NAME={name} >\nCPU_ONLINE CORE_0 1\n\n"
            for n, name in enumerate(names)
        )
        self.write("etc/nvpmodel.conf", f"{table}< PM_CONFIG DEFAULT=0 >\n")


def orin_nano(root: Path) -> Tree:
    """An Orin Nano in its 15 W mode with everything in sysfs."""
    tree = Tree(root)
    tree.ina3221(ORIN_NANO)
    tree.gpu()
    tree.temperature(48.0)
    tree.power_mode(0)
    return tree


class JtopError(Exception):
    """Plays jtop.JtopException."""


def rail(milliwatt: float, **more: Any) -> dict[str, Any]:
    """A rail as jtop describes it; ``avg`` is far off on purpose."""
    current = round(1000 * milliwatt / MILLIVOLT)
    power = int(MILLIVOLT * current / 1000)
    return {
        "type": "INA3221",
        "volt": int(MILLIVOLT),
        "curr": current,
        "warn": 32760,
        "crit": 32760,
        "power": power,
        "online": True,
        "avg": power // 3,
    } | more


def power(rails: Mapping[str, float]) -> dict[str, Any]:
    """``jtop.power``: the input rail is moved into ``tot``, else ``tot`` sums all rails."""
    named = {name: rail(milliwatt) for name, milliwatt in rails.items() if name != "NC"}
    for name in ("VIN", "POM_5V_IN", "VDD_IN"):
        if name in named:
            return {"tot": named.pop(name) | {"name": name}, "rail": named}
    sums = {key: sum(one[key] for one in named.values()) for key in ("power", "avg")}
    return {"tot": sums, "rail": named}


class FakeJtop:
    """The module jtop; each answer comes one interval of the service after the last.

    Attributes:
        answer: what ``jtop.power`` is at a time.
        error: what the connection fails with.
        dies_s: when the service stops.
    """

    JtopException = JtopError
    __version__ = "4.3.2"

    def __init__(
        self,
        answer: Callable[[float], Mapping[str, Any]] | Mapping[str, Any],
        *,
        clock: Any,
        interval: float = 1.0,
        error: str | None = None,
        dies_s: float = float("inf"),
    ) -> None:
        self.answer = answer if callable(answer) else lambda t: answer
        self.clock, self.interval, self.error, self.dies_s = clock, interval, error, dies_s
        self.gpu: dict[str, Any] = {
            "gpu": {
                "type": "integrated",
                "status": {"load": 99.0},
                "freq": {"cur": 612000, "min": 306000, "max": 612000},
            }
        }
        self.temperature: dict[str, Any] = {
            "cpu": {"temp": 41.0, "online": True},
            "gpu": {"temp": 48.0, "online": True},
        }
        self.nvpmodel: Any = SimpleNamespace(name="15W", id=0)
        self.asked_s: list[float] = []
        self.open_clients = 0

    def jtop(self, interval: float = 1.0) -> _Client:
        self.asked_s.append(interval)
        return _Client(self)


class _Client:
    def __init__(self, module: FakeJtop) -> None:
        self._module = module
        self.interval = module.interval

    def start(self) -> None:
        if self._module.error is not None:
            raise JtopError(self._module.error)
        self._module.open_clients += 1

    def close(self) -> None:
        self._module.open_clients -= 1

    def ok(self, spin: bool = False) -> bool:
        self._module.clock.sleep(self.interval)
        return self._module.clock() < self._module.dies_s

    @property
    def power(self) -> Mapping[str, Any]:
        return self._module.answer(self._module.clock())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
