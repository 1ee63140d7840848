"""``energylens validate`` on profiles: rows, page, plot, and one run against another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import Capture, error_of, run_json
from made_profile import phase, run, write

from energylens.cli import main

pytestmark = pytest.mark.usefixtures("no_debug")

CSV = (
    "record_id,device,engine,spec,phase,mode,batch,prompt_len,latency_s,energy_j\n"
    "one,h200,hf,llama3_8b,prefill,eager,8,1024,0.24,168\n"
)
KERNELS = [
    {"phase": "decode", "kind": k, "op": k, "count": 1.0, "latency_s": s, "share": 0.1}
    for k, s in (("gemm", 0.006), ("attention", 0.001), ("sampling", 2e-5))
]


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    document = run(prefill=phase(0.47, 330.0), decode=phase(0.0115, 6.5), breakdown=KERNELS)
    return write(tmp_path / "run.json", document)


def test_profiles_and_csv_files_mix(capsys: Capture, profile: Path, tmp_path: Path) -> None:
    table = tmp_path / "truth.csv"
    table.write_text(CSV, encoding="utf-8")
    document = run_json(capsys, "validate", str(table), str(profile), "--by", "phase")
    assert [r["record_id"] for r in document["rows"]] == ["one", "run-prefill", "run-decode"]
    assert [r["reason"] for r in document["rows"]] == [None] * 3
    assert [s["n"] for s in document["summary"]] == [3, 2, 1]
    one, _, decode = document["rows"]
    assert one["kinds"] == []
    kinds = {k["kind"]: k for k in decode["kinds"]}
    assert kinds["gemm"]["measured_s"] == 0.006
    assert kinds["gemm"]["error_pct"] == pytest.approx(
        100 * (kinds["gemm"]["predicted_s"] / 0.006 - 1)
    )
    assert kinds["norm"]["measured_s"] is None


def test_kernels_are_predicted_without_the_laws_that_they_do_not_show(
    capsys: Capture, profile: Path
) -> None:
    """The kind sums are those of `predict --without cap,host,gap`."""
    document = run_json(capsys, "validate", str(profile))
    (decode,) = (r for r in document["rows"] if r["record_id"] == "run-decode")
    command = "predict llama3_8b --engine hf --batch 16 --context-len 1088 --phase decode"
    laws = ("--mode", "cuda_graph", "--without", "cap,host,gap")
    prediction = run_json(capsys, *command.split(), *laws)
    gemms = sum(r["latency_s"] for r in prediction["breakdown"] if r["kind"] == "gemm")
    kinds = {k["kind"]: k["predicted_s"] for k in decode["kinds"]}
    assert kinds["gemm"] == pytest.approx(gemms)


def test_the_page_says_what_is_off_and_where(
    capsys: Capture, profile: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    assert main(["validate", str(profile), "--report", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "kernels of run-decode, without cap, host and gaps" in shown
    lines = page.read_text(encoding="utf-8").splitlines()
    heads = [line for line in lines if line.startswith("#")]
    assert heads == [
        "# Predictions against measurements",
        "## By phase",
        "## What dominates the error",
        "## Kernels by op kind, without cap, host and gaps",
        "## Farthest off (* outside the 90 % interval, 8 at most)",
    ]
    assert len(lines) < 70  # a page
    (gemm,) = (line for line in lines if line.startswith("| decode | gemm | 6.00 ms |"))
    assert gemm.count("|") == 6
    assert any(line.startswith("- kernels of decode: ") for line in lines)
    assert any(line.startswith("- device-bound latency: ") for line in lines)
    assert any(line.startswith("| run-decode | device | 11.5 ms | ") for line in lines)
    tables = [line for line in lines if line.startswith("|")]
    assert all(line.count("|") in (6, 8, 14) for line in tables)


def test_the_page_names_what_is_not_predicted_and_shows_the_plot(
    capsys: Capture, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    bad = run(record_id="bad", decode=phase(valid=False, flags=["throttled"]))
    files = [
        write(tmp_path / "good.json", run(decode=phase(0.0115, 6.5))),
        write(tmp_path / "bad.json", bad),
    ]
    page, plot = tmp_path / "page.md", tmp_path / "plots" / "all.png"
    plot.parent.mkdir()
    assert main(["validate", *map(str, files), "--report", str(page), "--plot", str(plot)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "![predicted against measured](plots/all.png)" in text
    assert (
        "## Not predicted\n\n- not predicted, bad-decode: not valid as measured: throttled" in text
    )
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in plot.parent.iterdir()] == ["all.png"]


def test_a_page_of_rows_that_cannot_be_predicted_is_still_one(
    capsys: Capture, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    file = write(tmp_path / "run.json", run(spec="none", decode=phase()))
    page, plot = tmp_path / "page.md", tmp_path / "all.svg"
    assert main(["validate", str(file), "--report", str(page), "--plot", str(plot)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "device-bound: none of 1 rows predicted" in text
    assert "## What dominates" not in text
    assert "## Farthest off" not in text
    assert plot.stat().st_size > 0


def test_a_line_of_the_page_stays_a_line(capsys: Capture, tmp_path: Path) -> None:
    names = {"record_id": "a|b\n# c"}
    files = [
        write(tmp_path / "good.json", run(**names, decode=phase(0.0115, 6.5))),
        write(tmp_path / "bad.json", run(**names, spec="x\ny", prefill=phase())),
    ]
    page = tmp_path / "page.md"
    assert main(["validate", *map(str, files), "--report", str(page)]) == 0
    lines = page.read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("| a/b # c-decode | device |") for line in lines)
    assert any(line.startswith("- not predicted, a|b # c-prefill: unknown spec") for line in lines)
    assert not any(line.startswith("# c") for line in lines)


@pytest.mark.parametrize(("kind", "latency_s"), [("gemm", 0.0), ("wait", 1.0)])
def test_kernels_that_took_no_time_are_not_compared(
    kind: str, latency_s: float, capsys: Capture, tmp_path: Path
) -> None:
    rows = [{**KERNELS[0], "kind": kind, "latency_s": latency_s}]
    file = write(tmp_path / "run.json", run(decode=phase(), breakdown=rows))
    page = tmp_path / "page.md"
    document = run_json(capsys, "validate", str(file), "--report", str(page))
    assert document["rows"][0]["kinds"] == []
    assert "## Kernels" not in page.read_text(encoding="utf-8")


def test_the_plot_holds_every_compared_row(
    monkeypatch: pytest.MonkeyPatch, profile: Path, tmp_path: Path
) -> None:
    axes = pytest.importorskip("matplotlib.axes")
    drawn: list[tuple[str, list[float], list[float]]] = []

    def errorbar(_: object, x: list[float], y: list[float], **rest: Any) -> None:
        assert all(low >= 0 for side in rest["yerr"] for low in side)
        drawn.append((rest["label"], x, y))

    monkeypatch.setattr(axes.Axes, "errorbar", errorbar)
    monkeypatch.setattr(axes.Axes, "legend", lambda *_, **__: None)
    assert main(["validate", str(profile), "--plot", str(tmp_path / "a.pdf")]) == 0
    assert [(label, x) for label, x, _ in drawn] == [
        ("decode, device-bound", [0.0115]),
        ("prefill, device-bound", [0.47]),
        ("decode, device-bound", [6.5]),
        ("prefill, device-bound", [330.0]),
    ]


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (["--report", "page.html"], "--report: page.html found, and must end in .md"),
        (["--plot", "a.txt"], "--plot: a.txt found, and must end in .png, .svg, .pdf"),
        (["--tolerance-pct", "3"], "--tolerance-pct: is about --baseline OLD.json"),
    ],
)
def test_bad_options_are_refused(
    capsys: Capture, profile: Path, extra: list[str], told: str
) -> None:
    assert told in error_of(capsys, "validate", str(profile), *extra)


# ---------------------------------------------------------------- --baseline


def against(
    folder: Path, old: dict[str, Any], new: dict[str, Any], *options: str
) -> tuple[str, ...]:
    """Arguments that compare the decode phase of two runs."""
    before = write(folder / "old.json", run(record_id="old", **old))
    after = write(folder / "new.json", run(record_id="new", **new))
    return ("validate", "--baseline", str(before), str(after), *options)


def test_the_same_again_is_no_regression(capsys: Capture, tmp_path: Path) -> None:
    arguments = against(tmp_path, {"decode": phase()}, {"decode": phase(0.0101, 5.1)})
    assert main(list(arguments)) == 0
    out, err = capsys.readouterr()
    lines = {" ".join(line.split()[:2]): line.split() for line in out.splitlines() if line.strip()}
    assert lines["decode latency"][2:] == (
        ["10.0", "ms", "10.1", "ms", "+1.0", "%", "±", "0.1", "%", "unchanged"]
    )
    assert lines["decode energy"][2:8] == ["5.00", "J", "5.10", "J", "+2.0", "%"]
    assert out.splitlines()[-1] == "no regression beyond 3 % and noise"
    assert err == ""


def test_a_regression_exits_with_3_and_is_named(capsys: Capture, tmp_path: Path) -> None:
    arguments = against(tmp_path, {"decode": phase()}, {"decode": phase(0.0105, 5.1)})
    assert main(list(arguments)) == 3
    assert capsys.readouterr().out.splitlines()[-1] == (
        "regression beyond 3 % and noise: decode latency"
    )
    assert main([*arguments, "--tolerance-pct", "6"]) == 0
    capsys.readouterr()
    assert main([*arguments, "--tolerance-pct", "1", "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "energylens/comparison/v1"
    assert (document["regressed"], document["incomplete"]) == (True, False)
    assert document["tolerance_pct"] == 1
    latency, energy = document["changes"]
    assert latency == {
        "phase": "decode",
        "quantity": "latency_s",
        "baseline": 0.01,
        "new": 0.0105,
        "change_pct": pytest.approx(5),
        "noise_pct": pytest.approx(105 * 0.001 * 2**0.5),
        "verdict": "regression",
        "reason": None,
    }
    assert (energy["verdict"], energy["change_pct"]) == ("regression", pytest.approx(2))


def test_a_noisy_run_is_no_regression_within_its_noise(capsys: Capture, tmp_path: Path) -> None:
    noisy = {"ci95": [0.009, 0.011]}
    arguments = against(
        tmp_path, {"decode": phase(latency=noisy)}, {"decode": phase(0.0105, latency=noisy)}
    )
    assert main(list(arguments)) == 0


def test_missing_energy_exits_with_4_and_says_why(capsys: Capture, tmp_path: Path) -> None:
    new = {"decode": phase(energy_j=None), "energy_reason": "no permission"}
    arguments = against(tmp_path, {"decode": phase()}, new)
    assert main(list(arguments)) == 4
    out, err = capsys.readouterr()
    assert "decode energy: not in the new run: no permission" in out
    assert err == (
        "energylens: incomplete: no verdict on all that the baseline holds; its reasons are above\n"
    )
    assert main(list(against(tmp_path, new, {"decode": phase()}))) == 0


def test_a_baseline_that_is_not_valid_is_not_blamed_on_the_new_run(
    capsys: Capture, tmp_path: Path
) -> None:
    throttled = {"decode": phase(valid=False, flags=["throttled"])}
    assert main(list(against(tmp_path, throttled, {"decode": phase()}))) == 4
    out, err = capsys.readouterr()
    assert "decode latency: baseline not valid as measured: throttled" in out
    assert "new run" not in out + err


@pytest.mark.parametrize(
    ("new", "told"),
    [
        ({"spec": "qwen3_moe"}, "not comparable: spec is llama3_8b in the baseline and qwen3_moe"),
        ({"device": "a6000"}, "not comparable: device is h200 in the baseline and a6000"),
        ({"workload": {"batch": 8}}, "not comparable: batch is 16 in the baseline and 8"),
        ({"modes": {"decode": "eager"}}, "not comparable: mode of decode is cuda_graph in the"),
        (
            {"parallelism": {"tp": 2}, "n_gpus": 2},
            "not comparable: tp is 1 in the baseline and 2",
        ),
    ],
)
def test_runs_that_are_not_comparable_exit_with_2(
    capsys: Capture, tmp_path: Path, new: dict[str, Any], told: str
) -> None:
    fields = {"decode": phase(per_gpu=[])}
    arguments = against(tmp_path, fields, fields | new)
    assert told in error_of(capsys, *arguments)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--by", "phase"), "--by: has no meaning with --baseline, which predicts nothing"),
        (("--plot", "a.png"), "--plot: has no meaning with --baseline"),
        (("--tolerance-pct", "-1"), "--tolerance-pct: -1 found, and must be 0 or more"),
        (("third.json",), "--baseline: 2 files found to compare with it, and must be one"),
    ],
)
def test_wrong_options_of_a_comparison_are_refused(
    capsys: Capture, tmp_path: Path, options: tuple[str, ...], told: str
) -> None:
    fields = {"decode": phase()}
    assert told in error_of(capsys, *against(tmp_path, fields, fields, *options))
