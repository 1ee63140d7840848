import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fake_board import FakeBoard, FakeClock, FakeMeter, FakeProvider
from rich.console import Console

from energylens.anchors import load_anchors
from energylens.bench.calibrate import Machine, run
from energylens.cli import main
from energylens.errors import CalibrationError, MeterError, SpecError, UnsupportedError
from energylens.store import Store, board_hash

PLAN = """\
schema: energylens/plan/v1
name: small
points:
- {kernel: gemm, grid: {m: [1, 2, 4, 8], "n, k": [[64, 64]]}}
- {kernel: hf_add, grid: {rows: [1, 2], width: [64]}}
"""
POINTS = 6


class Lab:
    """A machine of fake boards and a plan file, ready to be calibrated."""

    def __init__(self, tmp_path: Path, boards: int = 1, **board) -> None:
        clock = FakeClock()
        self.boards = [FakeBoard(f"GPU-{i}", clock=clock, **board) for i in range(boards)]
        self.meter = FakeMeter(*self.boards)
        self.providers = [FakeProvider(b) for b in self.boards]
        self.out = tmp_path / "out"
        self.plan = tmp_path / "plan.yaml"
        self.plan.write_text(PLAN)
        self.text = io.StringIO()
        self.environment: dict[str, str] = {}
        self.torchruns: list[tuple[int, list[str]]] = []
        self.torchrun_code = 0

    def run(self, **changes):
        def torchrun(workers: int, arguments) -> int:
            self.torchruns.append((workers, list(arguments)))
            return self.torchrun_code

        machine = Machine(
            meter=lambda: self.meter,
            provider=lambda name, ordinal: self.providers[ordinal],
            sleep=self.boards[0].sleep,
            torchrun=torchrun,
            environment=self.environment,
        )
        arguments = {"plan": self.plan, "out": self.out, "machine": machine}
        return run(**(arguments | changes), console=Console(file=self.text))

    def folder(self, board: int = 0) -> Path:
        return self.out / "samples" / "h200" / board_hash(f"GPU-{board}")

    def samples(self, block: str, board: int = 0):
        return [s for s in Store(self.folder(board)).samples if s.block == block]

    def fail_at(self, kernel: str, error: BaseException, board: int = 0) -> Callable[[], None]:
        """Let works of a kernel fail; returns how to mend them."""

        def before(op):
            if op.kernel == kernel:
                raise error

        self.providers[board].before = before

        def mend() -> None:
            self.providers[board].before = lambda op: None

        return mend


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path)


def test_a_run_measures_every_point_of_the_plan_and_keeps_its_provenance(lab):
    document = lab.run()
    ops = lab.samples("op")
    assert {s.op.shape for s in ops if s.op.kernel == "gemm"} == {(m, 64, 64) for m in (1, 2, 4, 8)}
    assert len(ops) == POINTS
    assert all(s.usable for s in ops)
    assert all(s.trial.latency_s == pytest.approx(1e-3) for s in ops)
    assert all(s.trial.power_w == pytest.approx(400.0, rel=0.01) for s in ops)
    (provenance,) = Store(lab.folder()).runs.values()
    assert provenance.device == "h200"
    assert provenance.power_limit_w == 700.0
    assert provenance.versions["torch"] == "2.11"
    assert provenance.versions["driver"] == "580.159"
    assert provenance.anchors.host.launch_us == 3.0
    assert provenance.anchors.boards[0].stream_w == pytest.approx(640.0, rel=0.01)
    assert "N(0, 1)" in provenance.data
    assert document["schema"] == "energylens/calibration/v1"
    assert document["device"] == "h200"
    json.dumps(document, allow_nan=False)


def test_no_uuid_is_written_anywhere(lab):
    lab.run()
    for path in lab.out.rglob("*"):
        if path.is_file():
            assert "GPU-0" not in path.read_text()


def test_mixes_host_points_and_idle_states_are_measured_too(lab):
    lab.run(tp=(1, 2), specs=("llama3_8b",), minutes=5)
    assert {s.label for s in lab.samples("mix")} == {"llama3_8b tp1", "llama3_8b tp2"}
    assert all(s.trial.latency_s == pytest.approx(4e-3) for s in lab.samples("mix"))
    (host,) = lab.samples("host")
    assert host.trial.latency_s == 2e-3
    assert host.trial.power_w == pytest.approx(140.0, rel=0.01)
    assert host.mode == "eager"
    (launching,) = lab.samples("idle")
    assert launching.label == "launching"
    assert launching.trial.power_w == pytest.approx(130.0, rel=0.01)
    assert {s.label for s in lab.samples("anchor")} == {"gemm", "idle"}


@pytest.mark.parametrize("blocks", [["overlaps"], ["collectives", "overlaps"]])
def test_what_only_several_gpus_show_is_refused_on_one(lab, blocks):
    with pytest.raises(SpecError, match=f"--blocks {','.join(blocks)}: only several GPUs show"):
        lab.run(blocks=blocks)


def test_blocks_can_be_chosen(lab):
    lab.run(blocks=["host"])
    assert lab.samples("op") == lab.samples("mix") == []
    assert len(lab.samples("host")) == 1
    with pytest.raises(SpecError, match="unknown block 'op'; allowed: collectives, overlaps, ops"):
        lab.run(blocks=["op"])


def test_an_anchor_run_measures_the_anchor_alone(lab):
    document = lab.run(anchor=True)
    assert lab.samples("op") == lab.samples("mix") == lab.samples("host") == []
    (path,) = (lab.out / "anchors").glob("*.json")
    assert path.name == f"h200-{board_hash('GPU-0')}.json"
    anchors = load_anchors(path)
    assert anchors.boards[0].gemm_tflops == pytest.approx(650.0)
    assert anchors.host.cpu == "fake cpu"
    assert document["anchors"] == [str(path)]
    assert lab.boards[0].time_s - 1000 < 25


def test_every_work_is_closed(lab):
    lab.fail_at("hf_add", RuntimeError("CUDA out of memory"))
    lab.run()
    assert all(work.closed for work in lab.providers[0].works)


def test_order_is_random_and_follows_the_seed(tmp_path):
    orders = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 3)):
        (tmp_path / name).mkdir()
        lab = Lab(tmp_path / name)
        lab.run(seed=seed)
        orders[name] = [op.shape for op in lab.providers[0].ran]
    assert orders["a"] == orders["b"]
    assert orders["a"] != orders["c"]
    assert sorted(orders["a"]) == sorted(orders["c"])


def test_an_interrupted_run_keeps_its_points_says_so_and_goes_on(lab):
    mend = lab.fail_at("hf_add", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        lab.run()
    kept = lab.samples("op")
    assert 0 < len(kept) + 1 <= POINTS
    assert f"interrupted: {len(kept) + 1} points are kept" in lab.text.getvalue().replace("\n", "")

    mend()
    ran_before = len(lab.providers[0].ran)
    document = lab.run()
    assert len(lab.providers[0].ran) == ran_before + POINTS - len(kept)
    assert document["boards"][0]["done_before"] == len(kept)
    assert len({s.key for s in lab.samples("op")}) == len(lab.samples("op")) == POINTS


def test_a_second_run_measures_nothing_twice_unless_it_is_to_start_anew(lab):
    lab.run()
    lab.run()
    assert len(lab.samples("op")) == POINTS
    lab.run(resume=False)
    assert len(lab.samples("op")) == 2 * POINTS


def test_a_point_out_of_memory_is_skipped_recorded_and_tried_again_next_time(lab):
    mend = lab.fail_at("hf_add", RuntimeError("CUDA out of memory. Tried to allocate\n2 GiB"))
    document = lab.run()
    skipped = [s for s in lab.samples("op") if s.trial is None]
    assert {s.reason for s in skipped} == {"out of memory"}
    assert len(skipped) == 2
    assert document["boards"][0]["skipped"] == {"out of memory": 2}
    assert len([s for s in lab.samples("op") if s.usable]) == POINTS - 2
    mend()
    lab.run()
    assert len({s.key for s in lab.samples("op") if s.usable}) == POINTS


def test_a_kernel_without_a_runnable_is_counted_with_its_reason(lab):
    lab.fail_at("hf_add", UnsupportedError("no runnable for hf_add"))
    document = lab.run()
    assert document["boards"][0]["skipped"] == {"no runnable for hf_add": 2}


def test_a_board_where_everything_fails_stops_the_run_and_keeps_what_is_there(lab):
    lab.plan.write_text(
        PLAN[: PLAN.index("- {kernel: hf_add")].replace("[1, 2,", "[1, 2, 3, 5, 6, 7,")
    )
    lab.fail_at("gemm", RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(CalibrationError, match=r"points in a row failed.*illegal memory access"):
        lab.run()
    assert Store(lab.folder()).samples


def test_a_lost_board_ends_the_run_with_what_is_kept(lab):
    lab.boards[0].lost_s = 1023.0
    with pytest.raises(MeterError, match="lost"):
        lab.run()
    assert Store(lab.folder()).runs


def test_throttled_points_are_kept_as_invalid_with_the_reason(tmp_path):
    # The board slows down after its anchor, which takes 20 s.
    lab = Lab(tmp_path, reasons=lambda t: 0x8 if t > 1020 else 0)
    with pytest.raises(MeterError, match="hw_slowdown"):
        lab.run(blocks=["ops"])
    assert lab.samples("op")
    assert not any(s.usable for s in lab.samples("op"))


def test_no_point_starts_after_the_time_is_up(lab):
    lab.plan.write_text(PLAN.replace("[1, 2, 4, 8]", str(list(range(1, 101)))))
    document = lab.run(minutes=1.5, blocks=["ops"])
    report = document["boards"][0]
    assert report["left"] > 0
    assert report["seconds"] < 90
    assert report["left"] + len(lab.samples("op")) == 102


def test_a_drift_of_the_board_is_reported(tmp_path):
    lab = Lab(tmp_path, idle_w=100.0)

    def before(op):
        lab.boards[0].idle_w = 110.0

    lab.providers[0].before = before
    document = lab.run()
    assert document["boards"][0]["drift"]["idle_w"] == pytest.approx(0.1, abs=0.01)
    assert any("moved by" in note for note in document["boards"][0]["notes"])


def test_samples_of_another_power_limit_are_refused_with_both_limits(lab):
    lab.run()
    lab.boards[0].power_limit_w = 500.0
    with pytest.raises(CalibrationError, match=r"700 W .* 500 W"):
        lab.run()
    assert len(lab.samples("op")) == POINTS


def test_what_could_spoil_a_measurement_is_said(lab):
    lab.meter.other_pids = (1234,)
    lab.boards[0].power_limit_w = 600.0
    document = lab.run()
    notes = " ".join(document["boards"][0]["notes"])
    assert "1 other process(es) use the board" in notes
    assert "600 W, below the default of 700 W" in notes
    assert "1234" not in (lab.folder() / "provenance.json").read_text()


# ------------------------------------------------------------------- what board is there


def test_another_device_than_asked_for_is_refused(lab):
    with pytest.raises(UnsupportedError, match="found NVIDIA H200, asked for a6000") as error:
        lab.run(device="a6000")
    assert error.value.exit_code == 2
    assert not lab.out.exists()
    assert lab.run(device="h200")["device"] == "h200"


def test_a_board_without_a_datasheet_is_named(lab):
    lab.meter.name = "NVIDIA Z9000"
    with pytest.raises(UnsupportedError, match="found NVIDIA Z9000, which has no datasheet"):
        lab.run()


def test_a_datasheet_can_be_brought_along(lab, tmp_path):
    from energylens.spec.resources import data_dir

    text = (data_dir("specs") / "devices" / "h200.yaml").read_text()
    text = text.replace("name: h200", "name: z9000").replace(
        "aliases: [", "aliases: [NVIDIA Z9000, "
    )
    path = tmp_path / "z9000.yaml"
    path.write_text(text)
    lab.meter.name = "NVIDIA Z9000"
    assert lab.run(device=str(path), anchor=True)["device"] == "z9000"


def test_more_gpus_than_there_are_is_an_error(lab):
    with pytest.raises(UnsupportedError, match=r"--gpus 2: this machine shows 1 GPU\(s\)"):
        lab.run(gpus=2)
    with pytest.raises(SpecError, match="--gpus: found 0"):
        lab.run(gpus=0)


def test_hidden_boards_do_not_count(tmp_path):
    lab = Lab(tmp_path, boards=2)
    lab.environment["CUDA_VISIBLE_DEVICES"] = "1"
    with pytest.raises(UnsupportedError, match="shows 1 GPU"):
        lab.run(gpus=2)


def test_a_board_without_energy_is_refused_before_anything_runs(lab):
    lab.meter.state = "not_supported"
    with pytest.raises(MeterError, match=r"energy cannot be measured.*Not Supported") as error:
        lab.run()
    assert error.value.exit_code == 4
    assert not lab.providers[0].works


def test_a_slice_of_a_board_is_refused(lab):
    lab.meter.mig = True
    with pytest.raises(MeterError, match="MIG"):
        lab.run()


def test_an_unknown_provider_is_refused(lab):
    with pytest.raises(SpecError, match=r"unknown provider 'torchh'; known: torch, vllm$"):
        lab.run(provider="torchh")
    assert main(["calibrate", "--provider", "torchh"]) == 2


def test_a_plan_that_is_not_there_is_refused_before_hardware_is_looked_for(tmp_path):
    def no_meter():
        raise AssertionError("asked for the hardware")

    for plan in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(SpecError, match=r"--plan: .* is no file; give a plan file"):
            run(plan=plan, out=tmp_path, machine=Machine(meter=no_meter))


@pytest.fixture
def installed(monkeypatch) -> set[str]:
    """Optional libraries that are found, whatever this environment has."""
    found = {"torch", "transformers", "vllm"}

    def find_spec(name: str) -> object | None:
        return object() if name in found else None

    monkeypatch.setattr("energylens.bench.calibrate.importlib.util.find_spec", find_spec)
    return found


@pytest.mark.parametrize(
    ("provider", "there", "missing", "extra"),
    [
        ("vllm", {"torch", "transformers"}, "vllm", "vllm"),
        ("vllm", set(), "torch and transformers and vllm", "vllm"),
        ("vllm", {"vllm", "torch"}, "transformers", "gpu"),
        ("torch", {"transformers"}, "torch", "gpu"),
    ],
)
def test_a_provider_whose_library_is_missing_names_the_extra(
    lab, installed, monkeypatch, capsys, no_debug, provider, there, missing, extra
):
    installed.intersection_update(there)
    monkeypatch.setattr("energylens.bench.calibrate._meter", lambda: lab.meter)
    out = ("--out", str(lab.out), "--plan", str(lab.plan))
    assert main(["calibrate", "--provider", provider, *out]) == 2
    text, err = capsys.readouterr()
    assert text == ""
    told = f"the {provider} provider needs {missing}; `pip install '.[{extra}]'` in the checkout"
    assert f"energylens: error: {told}\n" in err
    assert not lab.folder().exists()


# ------------------------------------------------------------------- several boards


def test_several_boards_share_the_plan_after_the_collectives(tmp_path):
    lab = Lab(tmp_path, boards=2)
    lab.plan.write_text(PLAN.replace("[1, 2, 4, 8]", str(list(range(1, 19)))))
    document = lab.run(gpus=2, minutes=10)
    folder = lab.out / "samples" / "h200" / "x2"
    ((workers, arguments),) = lab.torchruns
    assert workers == 2
    assert arguments[:2] == ["--out", str(folder)]
    assert document["collectives"] == str(folder)
    keys = [{s.op.key for s in lab.samples("op", board)} for board in (0, 1)]
    assert len(keys[0] | keys[1]) == 20
    assert len(keys[0] & keys[1]) == 3
    assert len(document["boards"]) == 2


def test_a_fresh_run_tells_the_workers(tmp_path):
    lab = Lab(tmp_path, boards=2)
    lab.run(gpus=2, blocks=["ops", "collectives"])
    lab.run(gpus=2, blocks=["collectives"], resume=False)
    assert ["--fresh" in arguments for _, arguments in lab.torchruns] == [False, True]


def test_collectives_of_two_algorithms_are_not_mixed_in_a_folder(tmp_path):
    lab = Lab(tmp_path, boards=2)
    folder = lab.out / "samples" / "h200" / "x2"
    lab.run()  # for its provenance, which stands in for that of a team
    (own,) = Store(lab.folder(0)).runs.values()
    with Store(folder) as store:
        store.begin(replace(own, versions={**own.versions, "nccl_algo": "auto"}))
    with pytest.raises(CalibrationError, match=r"algorithm auto, not Ring.*--out"):
        lab.run(gpus=2, nccl_algo="Ring")
    assert not lab.torchruns
    lab.run(gpus=2, blocks=["collectives"])
    assert len(lab.torchruns) == 1


def test_collectives_alone_leave_the_boards_alone(tmp_path):
    lab = Lab(tmp_path, boards=2)
    lab.run(gpus=2, blocks=["ops"])
    assert not lab.torchruns
    ran = len(lab.providers[0].works)
    lab.run(gpus=2, blocks=["collectives"])
    assert len(lab.torchruns) == 1
    assert len(lab.providers[0].works) == ran


def test_collectives_that_fail_are_reported_with_what_to_do(tmp_path):
    lab = Lab(tmp_path, boards=2)
    lab.torchrun_code = 1
    with pytest.raises(CalibrationError, match=r"exit code 1.*--gpus 1"):
        lab.run(gpus=2)


# ------------------------------------------------------------------- the fit


def test_the_fit_gets_all_folders_of_the_device(tmp_path):
    lab = Lab(tmp_path, boards=2)
    calls = []

    def fit(folders, device, provider, bundle):
        calls.append((list(folders), device.name, provider, bundle))
        return {"points": 12}

    document = lab.run(gpus=2, fit=fit)
    assert calls == [
        (
            sorted([lab.folder(0), lab.folder(1)]),
            "h200",
            "torch",
            lab.out / "bundles" / "h200" / "torch.json",
        )
    ]
    assert document["fit"] == {"points": 12}
    assert document["bundle"] == str(lab.out / "bundles" / "h200" / "torch.json")

    again = lab.run(fit_only=True, fit=fit)
    assert calls[1] == calls[0]
    assert again["device"] == "h200"


def test_a_fit_without_samples_says_so(lab):
    with pytest.raises(SpecError, match="holds samples of no device"):
        lab.run(fit_only=True)
    with pytest.raises(CalibrationError, match="no samples of h200"):
        lab.run(fit_only=True, device="h200")
