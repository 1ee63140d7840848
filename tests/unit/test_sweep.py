"""Sweeps: every cell once, whatever dies; the same numbers as one prediction gives."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import energylens
from energylens.cli import main
from energylens.errors import SpecError
from energylens.explore.front import exact_values
from energylens.results import Prediction
from energylens.spec.system import Overlapping
from energylens.sweep import Cell, read_grid, rows, run_cell, sweep

pytest.importorskip("joblib")
pytestmark = pytest.mark.usefixtures("no_debug")

Capture = pytest.CaptureFixture[str]

SMALL = """
schema: energylens/grid/v1
specs: [llama3_8b, llama3_70b]
devices: [h200, a6000]
layouts: [{tp: 1}, {tp: 2, replicas: 2}]
workloads: [{batch: 1}, {batch: 16, prompt_len: 512, gen_len: 32}]
"""
SERVED = """
schema: energylens/grid/v1
specs: [llama3_8b]
workloads: [{prompt_len: 400, gen_len: 100}]
rates: [RATES]
seeds: [1, 2]
duration_s: SECONDS
"""


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    path = tmp_path / "grid.yaml"
    path.write_text(SMALL, encoding="utf-8")
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


def results(path: Path) -> dict[str, Any]:
    """Result of each cell; no cell is there twice."""
    found = lines(path)
    by_key = {line["key"]: line["result"] for line in found}
    assert len(by_key) == len(found)
    return by_key


def assert_same_results(some: Path, others: Path) -> None:
    """The same cells with the same results, but for the last digits: BLAS sums in the order of its
    threads, and another process may have another number of them."""
    found, expected = results(some), results(others)
    assert found.keys() == expected.keys()
    for key, result in found.items():
        numbers = {n: v for n, v in expected[key].items() if isinstance(v, float)}
        assert {n: result[n] for n in numbers} == pytest.approx(numbers, rel=1e-9)
        assert {n: v for n, v in result.items() if n not in numbers} == {
            n: v for n, v in expected[key].items() if n not in numbers
        }


def test_a_grid_is_the_product_of_its_axes(grid: Path) -> None:
    cells = read_grid(grid)
    assert len(cells) == len(set(cells)) == 16
    assert {c.spec for c in cells} == {"llama3_8b", "llama3_70b"}
    assert {(c.parallelism.tp, c.parallelism.replicas) for c in cells} == {(1, 1), (2, 2)}
    assert {(c.batch, c.prompt_len, c.gen_len) for c in cells} == {(1, 1024, 128), (16, 512, 32)}
    assert {c.engine for c in cells} == {"vllm"}


def test_layouts_may_overlap_their_all_reduces(tmp_path: Path) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text(
        "schema: energylens/grid/v1\nspecs: [llama3_8b]\n"
        "layouts: [{tp: 2}, {tp: 2, overlap: 16x2}, {tp: 2, overlap: 'off'}]\n"
        "workloads: [{batch: 4, prompt_len: 2048, gen_len: 2}]\n",
        encoding="utf-8",
    )
    out = tmp_path / "results.jsonl"
    sweep(read_grid(grid), out, backend="threading", jobs=1)
    found = {row["overlap"]: row["ttft_s"] for row in rows(out)}
    asked = {"overlap": Overlapping(sm=16, chunks=2), "tp": 2, "batch": 4, "prompt_len": 2048}
    p = energylens.predict("llama3_8b", gen_len=2, **asked)
    assert isinstance(p, Prediction)
    assert found["16x2"] == pytest.approx(p.ttft_s, rel=1e-9)
    assert found[None] == found["off"] != found["16x2"]
    grid.write_text(grid.read_text(encoding="utf-8").replace("16x2", "16y2"), encoding="utf-8")
    with pytest.raises(SpecError, match=r"layouts\[1\].*16x4"):
        read_grid(grid)


def test_cells_are_what_predicting_them_alone_says(grid: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "results.jsonl"
    done = sweep(read_grid(grid), out, backend="threading", jobs=2)
    assert (done.cells, done.reused) == (16, 0)
    found = rows(out)
    assert len(found) == 16
    assert len({tuple(row) for row in found}) == 1, "all rows have the same columns"
    for row in found:
        p = energylens.predict(
            row["spec"],
            device=row["device"],
            tp=row["tp"],
            replicas=row["replicas"],
            batch=row["batch"],
            prompt_len=row["prompt_len"],
            gen_len=row["gen_len"],
        )
        assert row["feasible"] == isinstance(p, Prediction)
        if isinstance(p, Prediction):
            for name, (value, low, high) in exact_values(p).items():
                assert (row[name], row[f"{name}_low"], row[f"{name}_high"]) == (value, low, high)
        else:
            assert row["reason"] == p.reason and row["energy_per_token_j"] is None
    assert done.infeasible == sum(not row["feasible"] for row in found) > 0


def test_what_is_there_is_not_done_again(grid: Path, tmp_path: Path) -> None:
    out, calls = tmp_path / "a.jsonl", []

    def watch(done: Any, total: int) -> Any:
        calls.append(total)
        return done

    sweep(read_grid(grid)[:5], out, backend="threading", watch=watch)
    first = out.read_bytes()
    done = sweep(read_grid(grid), out, backend="threading", watch=watch)
    assert (calls, done.reused) == ([5, 11], 5)
    assert out.read_bytes().startswith(first)
    again = sweep(read_grid(grid), out, backend="threading", watch=watch)
    assert (calls, again.reused) == ([5, 11], 16)
    other = tmp_path / "b.jsonl"
    sweep(read_grid(grid), other, backend="loky", jobs=2)
    assert_same_results(other, out)


def test_an_edited_model_is_another_cell(tmp_path: Path) -> None:
    from energylens.spec.resources import data_dir

    spec, out = tmp_path / "own.yaml", tmp_path / "a.jsonl"
    text = (data_dir("specs") / "llama3_2_1b.yaml").read_text(encoding="utf-8")
    cells = (Cell(**_cell(spec=str(spec))),)
    for edited, new in ((text, 1), (text, 0), (text.replace("f: 8192", "f: 4096"), 1)):
        spec.write_text(edited, encoding="utf-8")
        before = len(lines(out)) if out.exists() else 0
        from energylens import sweep as module

        module._catalogue.cache_clear()  # another process would read the file again
        sweep(cells, out, backend="threading")
        assert len(lines(out)) - before == new


def _cell(**rest: Any) -> dict[str, Any]:
    from energylens.spec.system import Parallelism

    own = {"spec": "llama3_8b", "device": "h200", "engine": "vllm", "parallelism": Parallelism()}
    return own | {"batch": 1, "prompt_len": 64, "gen_len": 8} | rest


def test_a_line_that_was_cut_is_done_again(grid: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    cells = read_grid(grid)[:4]
    sweep(cells, out, backend="threading")
    whole = out.read_bytes()
    out.write_bytes(whole[:-40])
    assert sweep(cells, out, backend="threading").reused == 3
    assert sorted(out.read_bytes().splitlines()) == sorted(whole.splitlines())


def test_services_are_cells_too(tmp_path: Path) -> None:
    path, out = tmp_path / "grid.yaml", tmp_path / "a.jsonl"
    path.write_text(SERVED.replace("RATES", "2, 20").replace("SECONDS", "20"), encoding="utf-8")
    cells = read_grid(path)
    assert len(cells) == 4
    sweep(cells, out, backend="threading")
    found = {(row["rate_per_s"], row["seed"]): row for row in rows(out)}
    assert found[20.0, 1]["energy_per_request_j"] < found[2.0, 1]["energy_per_request_j"]
    assert found[2.0, 1]["ttft_s_p99"] != found[2.0, 2]["ttft_s_p99"], "seeds differ"
    for row in found.values():
        assert row["energy_per_request_j_low"] < row["energy_per_request_j"]
        assert row["ttft_s_p50"] <= row["ttft_s_p99"]
    arrivals = tmp_path / "times.txt"
    arrivals.write_text("".join(f"{0.1 * i:.1f}\n" for i in range(50)), encoding="utf-8")
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("100,10\n200,20\n", encoding="utf-8")
    path.write_text(
        "schema: energylens/grid/v1\nspecs: [llama3_8b]\n"
        f"arrivals: ['{arrivals}']\nworkloads: [{{lengths: '{lengths}'}}]\n",
        encoding="utf-8",
    )
    (cell,) = read_grid(path)
    _, row = run_cell("x", cell)
    assert row["feasible"] and row["requests_per_s"] > 5


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("specs: [a]", "key 'schema' is missing"),
        ("schema: energylens/grid/v1\nspecs: []", "specs: found []; allowed: a list with at least"),
        ("schema: energylens/grid/v1\nspecs: [nobody]", "nobody"),
        (SMALL.replace("tp: 1", "tp: 0"), "layouts[0].tp: found 0; allowed: a whole number"),
        (SMALL.replace("tp: 1", "ep: 2"), "layouts[0]: ep=2 must divide"),
        (SMALL + "rates: [5]", "workloads[0].batch: under traffic the engine forms the batches"),
        (SMALL + "seeds: [5]", "seeds: is about traffic; give rates or arrivals, too"),
        (SMALL.replace("batch: 1}", "lengths: a}"), "workloads[0].lengths: is about traffic"),
        ("schema: energylens/grid/v1\nspecs: [llama3_8b]\narrivals: [poisson]", "need rates"),
        ("schema: energylens/grid/v1\nspecs: [llama3_8b]\narrivals: [no.txt]", "no.txt: cannot be"),
    ],
)
def test_a_wrong_grid_is_one_line_before_the_work(
    capsys: Capture, tmp_path: Path, text: str, told: str
) -> None:
    path, out = tmp_path / "grid.yaml", tmp_path / "a.jsonl"
    path.write_text(text, encoding="utf-8")
    assert main(["sweep", str(path), "-o", str(out)]) == 2
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (
            ["--backend", "mpi"],
            "--backend: unknown value 'mpi'; allowed: loky, threading, dask, ray",
        ),
        (["--scheduler", "tcp://a:1"], "--scheduler is about --backend dask or ray, not loky"),
        (["--jobs", "0"], "--jobs: 0 found"),
        (["--csv", "/dev/null/a.csv"], "--csv: /dev/null/a.csv cannot be written"),
    ],
)
def test_wrong_arguments_are_told(
    capsys: Capture, grid: Path, tmp_path: Path, extra: list[str], told: str
) -> None:
    assert main(["sweep", str(grid), "-o", str(tmp_path / "a.jsonl"), *extra]) == 2
    assert told in capsys.readouterr().err


def test_a_missing_ray_is_told(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, grid: Path, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["sweep", str(grid), "-o", str(tmp_path / "a.jsonl"), "--backend", "ray"]) == 2
    err = capsys.readouterr().err
    assert err == "energylens: error: ray is not installed; pip install '.[ray]' in the checkout\n"


def test_another_file_is_not_appended_to(capsys: Capture, grid: Path, tmp_path: Path) -> None:
    out = tmp_path / "notes.txt"
    out.write_text("mine\n", encoding="utf-8")
    assert main(["sweep", str(grid), "-o", str(out)]) == 2
    assert "notes.txt:1: is no line of a sweep" in capsys.readouterr().err
    assert out.read_text(encoding="utf-8") == "mine\n"


def test_the_verb_tells_what_it_did(capsys: Capture, grid: Path, tmp_path: Path) -> None:
    out, table = tmp_path / "a.jsonl", tmp_path / "a.csv"
    words = ["sweep", str(grid), "-o", str(out), "--backend", "threading", "--csv", str(table)]
    assert main(words) == 0
    assert "16 cells in" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["cells"], document["reused"]) == (16, 16)
    with table.open(encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 16


# ---------------------------------------------------------------- what dies


def served(tmp_path: Path, cells: int, seconds: int) -> Path:
    path = tmp_path / "grid.yaml"
    rates = ", ".join(str(10 + i) for i in range(cells // 2))
    text = SERVED.replace("RATES", rates).replace("SECONDS", str(seconds))
    path.write_text(text, encoding="utf-8")
    return path


@contextmanager
def started(*words: str, cwd: Path, module: str = "energylens") -> Iterator[subprocess.Popen[str]]:
    root = str(Path(energylens.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-m", module, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={
            **os.environ,
            "PYTHONPATH": root,
            "OPENBLAS_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
        },
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.01)


def finished(out: Path) -> int:
    return out.read_bytes().count(b"\n") if out.exists() else 0


def test_a_killed_run_loses_nothing_that_was_finished(tmp_path: Path) -> None:
    grid, out = served(tmp_path, 24, 60), tmp_path / "a.jsonl"
    words = ("sweep", str(grid), "-o", str(out), "--backend", "threading", "--jobs", "1")
    with started(*words, cwd=tmp_path) as run:
        until(lambda: finished(out) >= 5, run)
        run.send_signal(signal.SIGKILL)
        run.wait()
    kept = results(out)
    assert 5 <= len(kept) < 24
    done = sweep(read_grid(grid), out, backend="threading")
    assert (done.cells, done.reused) == (24, len(kept))
    assert kept.items() <= results(out).items()
    assert len(results(out)) == 24


def command(pid: int) -> bytes:
    """Command line of a process; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def children(pid: int) -> list[int]:
    """Processes that a process has started, and runs of Python's own among them left out."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                stat = (folder / "stat").read_text(encoding="utf-8")
            except OSError:
                continue
            parent = int(stat.rpartition(")")[2].split()[1])
            if parent == pid and b"resource_tracker" not in command(int(folder.name)):
                found.append(int(folder.name))
    return found


@pytest.mark.slow
def test_a_process_that_dies_is_replaced(tmp_path: Path) -> None:
    grid, out = served(tmp_path, 60, 300), tmp_path / "a.jsonl"
    with started("sweep", str(grid), "-o", str(out), "--jobs", "2", cwd=tmp_path) as run:
        until(lambda: finished(out) >= 5, run)
        os.kill(children(run.pid)[0], signal.SIGKILL)
        before = finished(out)
        assert before < 60
        _, err = run.communicate(timeout=300)
        assert run.returncode == 0, err
    assert len(results(out)) == 60


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("distributed"), reason="no Dask here")
def test_dask_workers_may_die(tmp_path: Path) -> None:
    grid, out = served(tmp_path, 60, 300), tmp_path / "a.jsonl"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    scheduler = ("--host", "127.0.0.1", "--port", str(port), "--no-dashboard")
    worker = (address, "--nthreads", "1", "--no-nanny", "--no-dashboard")
    words = ("sweep", str(grid), "-o", str(out), "--backend", "dask", "--scheduler", address)
    with (
        started("scheduler", *scheduler, cwd=tmp_path, module="dask"),
        started("worker", *worker, cwd=tmp_path, module="dask") as first,
        started("worker", *worker, cwd=tmp_path, module="dask"),
        started(*words, cwd=tmp_path) as run,
    ):
        until(lambda: finished(out) >= 15, run)
        first.send_signal(signal.SIGKILL)
        before = finished(out)
        assert before < 60
        _, err = run.communicate(timeout=300)
        assert run.returncode == 0, err
    found = results(out)
    assert len(found) == 60 and all(row["feasible"] for row in found.values())
    alone = tmp_path / "alone.jsonl"
    sweep(read_grid(grid)[:8], alone, backend="threading")
    assert results(alone).items() <= found.items()


def ray_workers(pid: int) -> list[int]:
    """Processes that run cells for the Ray that a process has started."""
    raylets = [p for p in children(pid) if b"raylet/raylet" in command(p)]
    return [p for raylet in raylets for p in children(raylet) if b"ray::run_cell" in command(p)]


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="no Ray here")
def test_ray_workers_may_die(tmp_path: Path) -> None:
    grid, out = served(tmp_path, 60, 300), tmp_path / "a.jsonl"
    words = ("sweep", str(grid), "-o", str(out), "--backend", "ray", "--jobs", "2", "--json")
    with started(*words, cwd=tmp_path) as run:
        until(lambda: finished(out) >= 15 and len(ray_workers(run.pid)) == 2, run)
        os.kill(ray_workers(run.pid)[0], signal.SIGKILL)
        before = finished(out)
        assert before < 60
        text, err = run.communicate(timeout=300)
        assert run.returncode == 0, err
    assert json.loads(text)["cells"] == 60, "what Ray tells of the death is not on stdout"
    found = results(out)
    assert len(found) == 60 and all(row["feasible"] for row in found.values())
    alone = tmp_path / "alone.jsonl"
    sweep(read_grid(grid)[:8], alone, backend="threading")
    assert results(alone).items() <= found.items()


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="no Ray here")
def test_a_run_on_ray_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    grid, out = served(tmp_path, 40, 300), tmp_path / "a.jsonl"
    words = ("sweep", str(grid), "-o", str(out), "--backend", "ray", "--jobs", "2")
    with started(*words, cwd=tmp_path) as run:
        until(lambda: finished(out) >= 5, run)
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130
    kept = results(out)
    assert 5 <= len(kept) < 40
    with started(*words, cwd=tmp_path) as run:
        text, err = run.communicate(timeout=300)
        assert run.returncode == 0, err
    assert f"40 cells in {out}: {len(kept)} were there, {40 - len(kept)} are new" in text
    assert kept.items() <= results(out).items()
    assert len(results(out)) == 40
