"""The bridge between calibrating and predicting: one hashed JSON file per device and provider.

No pickle: a bundle holds training points and hyper-parameters as numbers, and everything derived
from them is computed when it is loaded.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from energylens.cost.board import Spread
from energylens.cost.features import StepShape
from energylens.cost.model import CostModelSet, KernelModel, Key, Published
from energylens.cost.overlap import OverlapLaw
from energylens.cost.regress import GaussianProcess
from energylens.errors import CalibrationError
from energylens.results import BoardAnchor, BundleRef, HostAnchor
from energylens.spec.system import Device, Link

SCHEMA = "energylens/bundle/v1"
_DIGITS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Laws:
    """Constants of the composition laws (DESIGN section 4), fitted on mixes, not on whole runs.

    Attributes:
        eta: above-idle energy of an execution goes with clock**eta.
        compute_scale: factor on the prior's compute share.
        cap_fraction: mean power that the governor holds, over the power limit.
        compute_stretch: how much more time and energy compute-bound work takes between the other
            kernels of a layer than alone; in proportion to its compute share.
        gap_s: time between kernels of a captured graph beyond what the kernels took alone, per
            launch.
        spin_w: above-idle watts of a board that spins in a collective.
        link_w: above-idle watts of a board for the whole of a step that has collectives: its links
            stay awake between them.
        overlap: how compute and collectives beside it hold each other up.
        latency_sd, energy_sd: relative errors of composed mixes with everything else right
            (composition component).
    """

    eta: float = 1.0
    compute_scale: float = 1.0
    compute_stretch: float = 0.0
    cap_fraction: float = 0.985
    gap_s: float = 0.0
    spin_w: float = 0.0
    link_w: float = 0.0
    overlap: OverlapLaw = field(default_factory=OverlapLaw)
    latency_sd: float = 0.15
    energy_sd: float = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHost:
    """Host time of a serving engine's step, in seconds.

    Attributes:
        step_s: of any step; sequence_s, token_s: more for each sequence and new token;
        layer_s: more for each layer where the step is too large to be captured;
        expert_layer_s: more again where the layer has experts.
        serial_share: part of all but the launching of layers during which no kernel of the step
            runs; launches run ahead of the device.
        layer_sd_s, expert_layer_sd_s: standard errors of the times of layers. They were told from
            models of a few layers, so they grow with the model.
    """

    step_s: float
    sequence_s: float
    token_s: float
    layer_s: float
    expert_layer_s: float
    serial_share: float
    layer_sd_s: float = 0.0
    expert_layer_sd_s: float = 0.0

    def total_s(self, shape: StepShape) -> float:
        """Seconds of one step."""
        return self._formed_s(shape) + self.launched_s(shape)

    def launched_s(self, shape: StepShape) -> float:
        """Seconds of them in which layers are launched: each pipeline stage launches its own."""
        launched = self.layer_s * shape.layers + self.expert_layer_s * shape.expert_layers
        return 0.0 if shape.is_captured else launched

    def layers_rel_se(self, shape: StepShape) -> float:
        """Relative standard error of the total that comes from the times of layers."""
        if shape.is_captured:
            return 0.0
        sd_s = math.hypot(
            self.layer_sd_s * shape.layers, self.expert_layer_sd_s * shape.expert_layers
        )
        return sd_s / self.total_s(shape)

    def serial_s(self, shape: StepShape) -> float:
        """Seconds of them that add to the device's."""
        return self.serial_share * self._formed_s(shape)

    def _formed_s(self, shape: StepShape) -> float:
        return self.step_s + self.sequence_s * shape.sequences + self.token_s * shape.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLaw:
    """Host time of a step, by number of workers (1, or more).

    An eager step takes ``launches * launch_s``; a serving engine's step what its `StepHost` says.

    Attributes:
        launch_s: seconds per launch on the host of ``anchor``, keyed by workers.
        steps: serving steps that follow each other without a pause, keyed by workers.
        lone_steps: serving steps that start when nothing else runs, likewise.
        wait_w: above-idle watts of a board that waits for its host, keyed by workers.
        anchor: median of the hosts that made the bundle; another host's times scale with its
            module time.
        rel_se: relative standard error on the same host.
    """

    launch_s: Mapping[int, float]
    wait_w: Mapping[int, float]
    anchor: HostAnchor
    rel_se: float
    steps: Mapping[int, StepHost] = field(default_factory=dict)
    lone_steps: Mapping[int, StepHost] = field(default_factory=dict)

    def nearest(self, workers: int) -> int:
        """The measured count that stands for ``workers``: the largest that does not exceed it."""
        known = sorted(self.wait_w)
        return max((n for n in known if n <= workers), default=known[0])


@dataclass(frozen=True, kw_only=True, eq=False)
class Bundle:
    """Fitted cost models of one device and software stack.

    Attributes:
        device, provider, version: what it stands for; version is a date and a counter.
        power_limit_w: limit under which everything was measured.
        boards: anchors of the boards that made it; ``typical`` is their mean, ``spread`` how they
            differ.
        kernels: fitted kernels; laws and host: composition.
        versions: software of the calibration; facts: points, errors and sample hash, for reports.
        sha256: hash of the file's content.
    """

    device: str
    provider: str
    version: str
    power_limit_w: float
    boards: tuple[BoardAnchor, ...]
    typical: BoardAnchor
    spread: Spread
    kernels: Mapping[str, KernelModel]
    laws: Laws
    host: HostLaw | None = None
    published: Published | None = None
    one_shot: Published | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    sha256: str = ""

    @property
    def ref(self) -> BundleRef:
        """Short reference for results."""
        return BundleRef(
            device=self.device, provider=self.provider, version=self.version, sha256=self.sha256
        )

    @property
    def dtypes(self) -> frozenset[str]:
        """Precisions of which any kernel was calibrated."""
        return frozenset().union(*(k.dtypes for k in self.kernels.values()))

    def model(self, device: Device, link: Link | None = None) -> CostModelSet:
        """The bundle's cost model for ``device``."""
        return CostModelSet(
            device=device,
            kernels=self.kernels,
            compute_scale=self.laws.compute_scale,
            compute_stretch=self.laws.compute_stretch,
            overlap=self.laws.overlap,
            link=link,
            published=self.published,
            one_shot=self.one_shot,
        )


def _numbers(values: Any) -> Any:
    array = np.asarray(values, dtype=np.float64)
    return json.loads(json.dumps([float(f"{v:.{_DIGITS}g}") for v in array.ravel()]))


def _gp_to_json(gp: GaussianProcess) -> dict[str, Any]:
    return {
        "y": _numbers(gp.y),
        "noise": _numbers(gp.noise),
        "length": _numbers(gp.length),
        "signal": gp.signal,
        "mean": gp.mean,
    }


def _gp_from_json(d: Mapping[str, Any], x: Any) -> GaussianProcess:
    return GaussianProcess(
        x=x,
        y=np.array(d["y"], dtype=np.float64),
        noise=np.array(d["noise"], dtype=np.float64),
        length=np.array(d["length"], dtype=np.float64),
        signal=float(d["signal"]),
        mean=float(d["mean"]),
    )


def _kernel_to_json(k: KernelModel) -> dict[str, Any]:
    return {
        "x": [_numbers(row) for row in k.latency.x],
        "latency": _gp_to_json(k.latency),
        "power": _gp_to_json(k.power),
        "latency_rel_se": k.latency_rel_se,
        "power_rel_se": k.power_rel_se,
        "latency_repeat_sd": k.latency_repeat_sd,
        "power_repeat_sd": k.power_repeat_sd,
        "keys": [[list(shape), dtype] for _, shape, dtype in k.keys],
        "measured": sorted([list(shape), dtype] for _, shape, dtype in k.measured - set(k.keys)),
    }


def _kernel_from_json(name: str, d: Mapping[str, Any]) -> KernelModel:
    x = np.array(d["x"], dtype=np.float64)
    keys = tuple(_key(name, entry) for entry in d["keys"])
    return KernelModel(
        kernel=name,
        latency=_gp_from_json(d["latency"], x),
        power=_gp_from_json(d["power"], x),
        latency_rel_se=float(d["latency_rel_se"]),
        power_rel_se=float(d["power_rel_se"]),
        measured=frozenset((*keys, *(_key(name, entry) for entry in d["measured"]))),
        keys=keys,
        latency_repeat_sd=float(d["latency_repeat_sd"]),
        power_repeat_sd=float(d["power_repeat_sd"]),
    )


def _key(kernel: str, entry: Sequence[Any]) -> Key:
    shape, dtype = entry
    return kernel, tuple(map(float, shape)), str(dtype)


def _content(bundle: Bundle) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "device": bundle.device,
        "provider": bundle.provider,
        "version": bundle.version,
        "power_limit_w": bundle.power_limit_w,
        "boards": [asdict(b) for b in bundle.boards],
        "typical": asdict(bundle.typical),
        "spread": asdict(bundle.spread),
        "laws": asdict(bundle.laws),
        "host": None
        if bundle.host is None
        else {
            "launch_s": {str(k): v for k, v in bundle.host.launch_s.items()},
            "wait_w": {str(k): v for k, v in bundle.host.wait_w.items()},
            "anchor": asdict(bundle.host.anchor),
            "rel_se": bundle.host.rel_se,
            "steps": {str(k): asdict(v) for k, v in bundle.host.steps.items()},
            "lone_steps": {str(k): asdict(v) for k, v in bundle.host.lone_steps.items()},
        },
        "published": _published_to_json(bundle.published),
        "one_shot": _published_to_json(bundle.one_shot),
        "versions": dict(bundle.versions),
        "facts": dict(bundle.facts),
        "kernels": {name: _kernel_to_json(k) for name, k in sorted(bundle.kernels.items())},
    }


def _published_to_json(table: Published | None) -> dict[str, Any] | None:
    if table is None:
        return None
    return {
        "workers": list(table.workers),
        "values": list(table.values),
        "latency_s": {k: [_numbers(r) for r in v] for k, v in table.latency_s.items()},
    }


def _published_from_json(d: Mapping[str, Any] | None) -> Published | None:
    if d is None:
        return None
    return Published(
        workers=tuple(d["workers"]),
        values=tuple(d["values"]),
        latency_s={k: np.array(v, dtype=np.float64) for k, v in d["latency_s"].items()},
    )


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def dump_bundle(bundle: Bundle) -> str:
    """The bundle as the text of its file, with the hash of its content."""
    content = _content(bundle)
    return (
        json.dumps({**content, "sha256": _digest(content)}, separators=(",", ":"), allow_nan=False)
        + "\n"
    )


def load_bundle(path: Path) -> Bundle:
    """Read and check a bundle.

    Raises:
        CalibrationError: missing, not a bundle, cut off, or its content does not match its hash.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CalibrationError(f"{path}: cannot read the bundle ({error.strerror})") from None
    except ValueError:
        raise CalibrationError(
            f"{path}: not a bundle, or cut off; calibrate again or fetch the file again"
        ) from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise CalibrationError(f"{path}: schema {found!r} found, {SCHEMA} needed")
    sha256 = document.pop("sha256", None)
    try:
        intact = sha256 == _digest(document)
    except ValueError:  # infinite or not a number: nothing that was ever written
        intact = False
    if not intact:
        raise CalibrationError(
            f"{path}: the content does not match its sha256; the file was changed or damaged"
        )
    try:
        return _parse(document, sha256)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CalibrationError(
            f"{path}: a bundle of another version ({error}); calibrate again"
        ) from None


def _parse(d: Mapping[str, Any], sha256: str) -> Bundle:
    host = d["host"]
    return Bundle(
        device=d["device"],
        provider=d["provider"],
        version=d["version"],
        power_limit_w=float(d["power_limit_w"]),
        boards=tuple(BoardAnchor(**b) for b in d["boards"]),
        typical=BoardAnchor(**d["typical"]),
        spread=Spread(**d["spread"]),
        laws=Laws(**d["laws"] | {"overlap": OverlapLaw(**d["laws"]["overlap"])}),
        host=None
        if host is None
        else HostLaw(
            launch_s={int(k): float(v) for k, v in host["launch_s"].items()},
            wait_w={int(k): float(v) for k, v in host["wait_w"].items()},
            anchor=HostAnchor(**host["anchor"]),
            rel_se=float(host["rel_se"]),
            steps={int(k): StepHost(**v) for k, v in host["steps"].items()},
            lone_steps={int(k): StepHost(**v) for k, v in host["lone_steps"].items()},
        ),
        published=_published_from_json(d["published"]),
        one_shot=_published_from_json(d["one_shot"]),
        versions=d["versions"],
        facts=d["facts"],
        kernels={name: _kernel_from_json(name, k) for name, k in d["kernels"].items()},
        sha256=sha256,
    )


def select(bundles: Sequence[Bundle], device: str, provider: str) -> Bundle | None:
    """The newest bundle of a device and provider, or None."""
    fitting = [b for b in bundles if b.device == device and b.provider == provider]
    return max(fitting, key=lambda b: [int(n) for n in re.findall(r"\d+", b.version)], default=None)
