"""What a Jetson shows of itself: its name, its power monitors in sysfs, and jtop's answers.

Layout of sysfs: ``Documentation/hwmon/ina3221.rst`` and ``ina238.rst`` of the Linux kernel;
``iio:device*`` (``rail_name_N``) in Jetson Linux 32 and older. Form of jtop's answers: the
docstring of ``jtop.power`` in jetson-stats. jtop's ``avg`` is a running half-and-half smoothing and
its total without a name a sum that may count rails twice; neither is used. The only file that
imports jtop, and only when a source is made.
"""

from __future__ import annotations

import abc
import queue
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from energylens.errors import MeterError
from energylens.meter.rails import is_known, rail_name
from energylens.units import HZ_PER_KHZ, W_PER_MW, W_PER_UW

_JTOP_INTERVAL_S = 0.5  # asked for; faster loads the CPU, whose power is in the total
_POLL_S = 0.05  # of sysfs; each read of a rail is an I2C transfer of about 1 ms
_SHUNT_STEP_V = 40e-6  # of the INA3221, by its data sheet
_AGREEMENT = 0.05  # of a power register and volts times amperes
_TEGRA_WORDS = ("jetson", "tegra", "orin", "xavier", "thor")
_GPU_NODE = re.compile(r"gpu|g[a-z]\d+b")
_JTOP_HINTS = (
    ("not active", "start its service: sudo systemctl start jtop.service"),
    ("access", "join the group jtop and log in again; in a container: --group-add with its number"),
    ("Mismatch", "install the jetson-stats of the same version as its service"),
)
SOCKET = "run/jtop.sock"
"""Where the service of jetson-stats listens."""


def tegra_board(root: Path = Path("/")) -> str | None:
    """Name of the Jetson board, or None on other machines.

    The CPU architecture says nothing: Grace Hopper is aarch64 too.
    """
    name = read_text(root / "proc/device-tree/model") or ""
    if (root / "etc/nv_tegra_release").exists():
        return name or "Jetson"
    return name if any(word in name.lower() for word in _TEGRA_WORDS) else None


def has_rails(root: Path = Path("/")) -> bool:
    """Whether sysfs shows the rails of a known Jetson, whatever the machine calls itself."""
    return is_known(channel.name for channel in _channels(root))


def read_text(path: Path) -> str | None:
    """Text of a file without the ends that the kernel puts around it, or None."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip("\0\n ")
    except OSError:
        return None


def _number(path: Path) -> float | None:
    """Number in a file of sysfs, or None where it is missing, offline or no number."""
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None


def _scaled(value: object, factor: float) -> float | None:
    return value * factor if isinstance(value, int | float) else None


# --------------------------------------------------------------------------- sources of samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One look at a module: watts of the rails that answered, and the state of its GPU."""

    watts: Mapping[str, float]
    clock_hz: float | None = None
    temperature_c: float | None = None
    load: float | None = None
    over_current: float | None = None


class AbstractSource(abc.ABC):
    """Where frames come from.

    Attributes:
        name: for people. wait_s: pause between two frames, 0 where `read` waits itself.
        steps_w: resolution of each rail.
        lost: rails that were found and are not used, and why.
    """

    def __init__(self, name: str, wait_s: float) -> None:
        """Start without a rail."""
        self.name, self.wait_s = name, wait_s
        self.steps_w: dict[str, float] = {}
        self.lost: dict[str, str] = {}

    @abc.abstractmethod
    def open(self) -> None:
        """Get ready.

        Raises:
            MeterError: it does not answer; the text says what to do.
        """

    @abc.abstractmethod
    def read(self) -> Frame:
        """The next frame.

        Raises:
            MeterError: it answers no more.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Give it back."""

    def step_w(self, rails: Iterable[str]) -> float:
        """Resolution of the sum of these rails."""
        return sum(self.steps_w.get(rail, 0.0) for rail in rails)

    def mode(self) -> str | None:
        """Power mode, where this source knows better than the files of nvpmodel."""
        return None


@dataclass(frozen=True, slots=True)
class _Channel:
    """A rail in sysfs; power is in its own file, or volts times amperes.

    Attributes:
        power: file and watts per unit, decided by the interface: hwmon counts microwatts, the older
            iio milliwatts.
        shunt_ohm: resistance that the current is measured over.
    """

    name: str
    volts: Path
    amperes: Path
    power: tuple[Path, float] | None = None
    shunt_ohm: float | None = None

    def product_w(self) -> float | None:
        """Volts times amperes."""
        milli_volt, milli_ampere = _number(self.volts), _number(self.amperes)
        if milli_volt is None or milli_ampere is None:
            return None
        return milli_volt * milli_ampere * 1e-6

    def watts(self) -> float | None:
        """Power, or None where the rail does not answer."""
        if self.power is None:
            return self.product_w()
        return _scaled(_number(self.power[0]), self.power[1])

    def step_w(self) -> float:
        """Resolution: of the chip where its shunt is known, else that of whole milliamperes."""
        volts = (_number(self.volts) or 0.0) * 1e-3
        return volts * (_SHUNT_STEP_V / self.shunt_ohm if self.shunt_ohm else 1e-3)

    def defect(self) -> str | None:
        """Why it cannot be used, or None."""
        watts, product = self.watts(), self.product_w()
        if watts is None:
            return f"{self.volts.parent.name} does not answer"
        if self.power and product and abs(watts - product) > max(_AGREEMENT * product, 0.1):
            return f"its power is {watts:.4g} W, but volts times amperes {product:.4g} W"
        return None


def _channels(root: Path) -> list[_Channel]:
    """Rails of all power monitors; a monitor that several folders show counts once."""
    patterns = (
        "sys/class/hwmon/hwmon*",
        "sys/bus/i2c/drivers/ina*/*/hwmon/hwmon*",
        "sys/bus/i2c/drivers/ina*/*/iio:device*",
        "sys/bus/iio/devices/iio:device*",
    )
    chips = {p.resolve(): p for pattern in patterns for p in sorted(root.glob(pattern))}
    found: dict[str, _Channel] = {}
    for chip in chips:
        kind = read_text(chip / "name") or ""
        for channel in _iio(chip) if chip.name.startswith("iio") else _hwmon(chip, kind):
            name, copies = channel.name, 2
            while channel.name in found:  # never let one rail hide another
                channel = replace(channel, name=f"{name}_{copies}")
                copies += 1
            found[channel.name] = channel
    return list(found.values())


def _hwmon(chip: Path, kind: str) -> Iterator[_Channel]:
    if kind == "ina238":
        # It has one channel and no label; on Jetsons it watches the input of the carrier board.
        label = read_text(chip / "label") or "VIN"
        power = (chip / "power1_input", W_PER_UW)
        yield _Channel(rail_name(label), chip / "in1_input", chip / "curr1_input", power)
    elif kind.startswith("ina3221"):
        for n in (1, 2, 3):  # 4 to 7 are shunt voltages
            amperes = chip / f"curr{n}_input"
            label = read_text(chip / f"in{n}_label") or f"unlabelled {chip.name} channel {n}"
            if (
                label.upper() == "NC"
                or _number(chip / f"in{n}_enable") == 0
                or not amperes.exists()
            ):
                continue
            shunt = _number(chip / f"shunt{n}_resistor")
            ohm = shunt * 1e-6 if shunt else None
            yield _Channel(rail_name(label), chip / f"in{n}_input", amperes, None, ohm)


def _iio(chip: Path) -> Iterator[_Channel]:
    for file in sorted(chip.glob("rail_name_*")):
        n, label = file.name.removeprefix("rail_name_"), read_text(file) or ""
        if label.upper() == "NC":
            continue
        power = chip / f"in_power{n}_input"
        yield _Channel(
            rail_name(label or f"unlabelled {chip.name} channel {n}"),
            chip / f"in_voltage{n}_input",
            chip / f"in_current{n}_input",
            (power, W_PER_MW) if power.exists() else None,
        )


class State:
    """Clock, temperature and load of the GPU, power mode and clocks, from files below ``root``."""

    def __init__(self, root: Path) -> None:
        """Find the files below ``root``."""
        self.root = root
        nodes = [p for p in sorted(root.glob("sys/class/devfreq/*")) if _GPU_NODE.search(p.name)]
        self._gpu = nodes[0] if nodes else root / "sys/class/devfreq/none"
        zones = {
            (read_text(p / "type") or "").lower(): p
            for p in sorted(root.glob("sys/class/thermal/thermal_zone*"))
        }
        wanted = [p for word in ("gpu", "tj") for name, p in zones.items() if word in name]
        self._zone = wanted[0] if wanted else None
        self._events = sorted(root.glob("sys/class/hwmon/hwmon*/oc*_event_cnt"))

    def gpu_hz(self, which: str = "cur") -> float | None:
        """Clock of the GPU: ``cur``, ``min`` or ``max``."""
        return _number(self._gpu / f"{which}_freq")

    def temperature_c(self) -> float | None:
        """Temperature of the GPU."""
        return _scaled(_number(self._zone / "temp"), 1e-3) if self._zone else None

    def load(self) -> float | None:
        """Busy part of the GPU's time."""
        return _scaled(_number(self._gpu / "device/load"), 1e-3)

    def over_current(self) -> float | None:
        """Over-current and under-voltage events since the start, each of which throttles."""
        counts = [_number(file) for file in self._events]
        return sum(c or 0.0 for c in counts) if counts else None

    def clocks_hz(self) -> tuple[tuple[str, float], ...]:
        """Clocks that the power mode sets."""
        cpu = [
            _number(p)
            for p in self.root.glob("sys/devices/system/cpu/cpufreq/policy*/scaling_max_freq")
        ]
        found = {
            "gpu_min": self.gpu_hz("min"),
            "gpu_max": self.gpu_hz("max"),
            "cpu_max": _scaled(max((c for c in cpu if c), default=None), HZ_PER_KHZ),
            "memory": _number(self.root / "sys/kernel/debug/bpmp/debug/clk/emc/rate"),
        }
        return tuple((name, hz) for name, hz in found.items() if hz is not None)

    def mode(self) -> str | None:
        """Name of the power mode that nvpmodel set last, by its status file."""
        status = re.search(r"pmode:(\d+)", read_text(self.root / "var/lib/nvpmodel/status") or "")
        if status is None:
            return None
        number = int(status[1])
        table = read_text(self.root / "etc/nvpmodel.conf") or ""
        name = re.search(rf"^<\s*POWER_MODEL\s+ID={number}\s+NAME=(\w+)", table, re.MULTILINE)
        return name[1] if name else f"MODE_{number}"

    def release(self) -> str | None:
        """Version of Jetson Linux, e.g. ``36.4.7``; no version is a reason to stop."""
        text = read_text(self.root / "etc/nv_tegra_release") or ""
        found = re.search(r"R(\d+).*?REVISION:\s*([\d.]+)", text)
        return f"{found[1]}.{found[2]}" if found else None


class SysfsSource(AbstractSource):
    """Rails in sysfs."""

    def __init__(self, state: State) -> None:
        """Look for monitors beside the files of ``state``, at `open`."""
        super().__init__(f"power monitors in sysfs, every {_POLL_S:g} s", _POLL_S)
        self._state = state
        self._used: list[_Channel] = []

    def open(self) -> None:
        """Find the rails, and leave those out that contradict themselves."""
        self._used = []
        for channel in _channels(self._state.root):
            defect = channel.defect()
            if defect is None:
                self._used.append(channel)
                self.steps_w[channel.name] = channel.step_w()
            else:
                self.lost[channel.name] = defect
        if not self._used:
            why = "; ".join(f"{name}: {text}" for name, text in self.lost.items())
            raise MeterError(f"sysfs shows no power monitor ({why or 'no INA3221 or INA238'})")

    def read(self) -> Frame:
        """Every rail, one after another."""
        watts = {channel.name: channel.watts() for channel in self._used}
        return Frame(
            watts={name: w for name, w in watts.items() if w is not None},
            clock_hz=self._state.gpu_hz(),
            temperature_c=self._state.temperature_c(),
            load=self._state.load(),
            over_current=self._state.over_current(),
        )

    def close(self) -> None:
        """Nothing is held."""


class JtopSource(AbstractSource):
    """Rails as the service of jetson-stats reads them; it decides how often."""

    def __init__(self, module: Any, state: State) -> None:
        """Take jtop from ``module``; None imports it.

        Raises:
            MeterError: it is not installed.
        """
        super().__init__("jtop", 0.0)
        self._module, self._state = module or _load(), state
        self._chip_steps_w: dict[str, float] = {}
        self._errors = (self._module.JtopException, OSError, EOFError, KeyError, queue.Empty)
        self._client: Any = None

    def open(self) -> None:
        """Connect to the service, at the pace that it has if another client has set one."""
        self._client = self._connected(_JTOP_INTERVAL_S)
        if self._client.interval > _JTOP_INTERVAL_S:  # a client that expects more repeats itself
            pace_s = self._client.interval
            self._client.close()
            self._client = self._connected(pace_s)
        # Its values are rounded to milliamperes; the monitor's own steps are larger.
        self._chip_steps_w = {c.name: c.step_w() for c in _channels(self._state.root)}
        version = getattr(self._module, "__version__", "")
        self.name = f"jtop {version}".strip() + f", every {self._client.interval:g} s"

    def _connected(self, interval_s: float) -> Any:
        client = self._module.jtop(interval=interval_s)
        try:
            client.start()
        except self._errors as error:
            text = (str(error) or repr(error)).partition("\n")[0].partition(" Please")[0]
            hint = next((h for words, h in _JTOP_HINTS if words in text), "look at jtop --health")
            raise MeterError(f"jtop: {text.rstrip('.:')}; {hint}") from error
        return client

    def read(self) -> Frame:
        """The service's next answer."""
        client = self._client  # `close` may come in between
        try:
            if not client.ok():  # waits for the next answer
                raise MeterError("jtop: its service stopped")
            rails = dict(_rails(client.power))
            gpu: Mapping[str, Any] = next(iter(dict(client.gpu).values()), {})
            temperature: Mapping[str, Any] = next(
                (t for n, t in client.temperature.items() if "gpu" in n.lower()), {}
            )
        except self._errors as error:
            raise MeterError(f"jtop: {error}") from error
        for name, (_, step_w) in rails.items():
            self.steps_w[name] = max(step_w, self._chip_steps_w.get(name, 0.0))
        online = temperature.get("online", True)
        return Frame(
            watts={name: watts for name, (watts, _) in rails.items()},
            clock_hz=_scaled(gpu.get("freq", {}).get("cur"), HZ_PER_KHZ),
            temperature_c=_scaled(temperature.get("temp"), 1.0) if online else None,
            load=_scaled(gpu.get("status", {}).get("load"), 0.01),
            over_current=self._state.over_current(),
        )

    def close(self) -> None:
        """Leave the service."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def mode(self) -> str | None:
        """Power mode as the service knows it."""
        model = self._client.nvpmodel if self._client is not None else None
        return str(model.name) if model is not None else None


def _rails(power: Mapping[str, Any] | None) -> Iterator[tuple[str, tuple[float, float]]]:
    """Rail, its watts and their resolution, from ``jtop.power``.

    jtop moves the input rail out of ``rail`` into ``tot``, which then has its name; without a
    name ``tot`` is a sum of all rails. Without sensors there is no ``rail``.
    """
    power = power or {}
    rails = dict(power.get("rail") or {})
    total = power.get("tot") or {}
    if "name" in total:
        rails[total["name"]] = total
    for label, rail in rails.items():
        # USB-C and other supplies are listed too: what was agreed on, not what flows.
        measured = str(rail.get("type", "INA")).startswith("INA")
        if not measured or rail.get("online") is False or label.upper() == "NC":
            continue
        volt, current = rail.get("volt"), rail.get("curr")
        if volt is not None and current is not None:
            yield rail_name(label), (volt * current * 1e-6, volt * 1e-6)
        elif rail.get("power") is not None:
            yield rail_name(label), (rail["power"] * W_PER_MW, W_PER_MW)


def _load() -> Any:
    try:
        import jtop
    except ImportError as error:
        raise MeterError(
            "jetson-stats is not installed (pip install '.[jetson]' in the checkout)"
        ) from error
    return jtop
