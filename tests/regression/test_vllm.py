"""Predictions of vLLM against measurements: truth rows, and a recorded run of the real engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from energylens.anchors import anchors_from_json
from energylens.predict import Catalogue, predict, predict_measurement
from energylens.results import Anchors, Infeasible, Measurement, Prediction
from energylens.results.service import ServingResult
from energylens.serving import Limits, Traffic, serve
from energylens.spec.system import Phase, Serving, Workload
from energylens.truth import read_measurements
from energylens.validate import validate

RUN = Path(__file__).parents[2] / "benchmarks" / "results" / "vllm_llama3_8b.json"
CATALOGUE = Catalogue()
VLLM, H200 = CATALOGUE.engine("vllm"), CATALOGUE.device("h200")
LLAMA = CATALOGUE.spec("llama3_8b")
BUNDLES = CATALOGUE.bundles(H200, VLLM)


# ---------------------------------------------------------------- truth rows


def beside(m: Measurement, anchors: Anchors | None) -> Prediction | Infeasible | str:
    return predict_measurement(m, anchors=anchors, without=frozenset(), catalogue=CATALOGUE)


@pytest.mark.parametrize(
    ("ignore_anchors", "latency_pct", "energy_pct"), [(False, 4.0, 4.0), (True, None, 6.0)]
)
def test_dense_truth_rows_are_within_the_aims(
    shared_truth: Path, ignore_anchors: bool, latency_pct: float | None, energy_pct: float
) -> None:
    rows = [m for m in read_measurements([shared_truth / "h200_vllm.csv"]) if m.spec == "llama3_8b"]
    assert len(rows) >= 24
    result = validate(rows, beside, ignore_anchors=ignore_anchors)
    assert [r.reason for r in result.rows] == [None] * len(rows)

    def mape(name: str) -> float:
        pairs = [(getattr(r, name).predicted, getattr(r.measurement, name)) for r in result.rows]
        return 100 * float(np.mean([abs(p / m - 1) for p, m in pairs]))

    assert mape("energy_j") <= energy_pct
    if latency_pct is not None:
        assert mape("latency_s") <= latency_pct


# ---------------------------------------------------------------- a recorded run


@pytest.fixture(scope="module")
def run() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(RUN.read_text(encoding="utf-8"))
    return document


@pytest.fixture(scope="module")
def anchors(run: dict[str, Any]) -> Anchors:
    return anchors_from_json(run["anchors"], where=str(RUN))


def test_whole_steps_are_predicted(run: dict[str, Any], anchors: Anchors) -> None:
    errors = []
    for row in run["rows"]:
        result = predict(
            LLAMA,
            engine=VLLM,
            device=H200,
            workload=Workload(
                batch=row["batch"],
                prompt_len=row["prompt_len"],
                gen_len=1,
                context_len=row["context_len"],
            ),
            bundles=BUNDLES,
            anchors=anchors,
            phases=(Phase(row["phase"]),),
        )
        assert isinstance(result, Prediction)
        phase = result.phases[row["phase"]]
        measured_j = sum(row["power_w"]) * row["latency_s"]
        errors.append((phase.latency_s / row["latency_s"] - 1, phase.energy_j / measured_j - 1))
    assert len(errors) >= 10
    assert np.abs(errors).mean(axis=0).max() <= 0.04
    assert np.abs(errors).max() <= 0.10


def test_continuous_batching_is_simulated_as_it_ran(
    run: dict[str, Any], anchors: Anchors, tmp_path: Path
) -> None:
    serving = run["serving"]
    table = np.array(serving["requests"])
    arrival, prompt, gen, first, last = (
        table[:, serving["columns"].index(name)]
        for name in ("arrival_s", "prompt_len", "gen_len", "first_s", "last_s")
    )
    path = tmp_path / "arrivals.txt"
    path.write_text("\n".join(map(str, arrival.tolist())), encoding="utf-8")
    result = serve(
        LLAMA,
        engine=VLLM,
        device=H200,
        traffic=Traffic(
            arrivals=str(path),
            lengths=tuple(zip(prompt.astype(int).tolist(), gen.astype(int).tolist(), strict=True)),
        ),
        limits=Limits(batch_tokens=run["engine"]["batch_tokens"]),
        bundles=BUNDLES,
        anchors=anchors,
    )
    assert isinstance(result, ServingResult)
    assert result.tpot_s is not None
    assert result.traffic.requests == len(arrival) >= 1000
    assert result.preemptions == 0
    assert not result.saturated
    energy_j = sum(serving["power_w"]) * (serving["end_s"] - arrival[0]) / len(arrival)
    several = gen > 1
    tpot_s = ((last - first)[several] / (gen[several] - 1)).mean()
    assert result.energy_per_request_j == pytest.approx(energy_j, rel=0.08)
    assert result.tpot_s.mean == pytest.approx(tpot_s, rel=0.08)
    # The engine ran in the process of the client: no server's own time is in this.
    assert result.ttft_s.mean == pytest.approx((first - arrival).mean(), rel=0.15)


def test_the_profile_has_the_limits_that_the_engine_chose(run: dict[str, Any]) -> None:
    facts, own = run["engine"], VLLM.serving
    assert isinstance(own, Serving)
    assert run["versions"]["vllm"] == VLLM.version
    assert list(own.capture_sizes) == facts["capture_sizes"]
    assert own.offline_batch_tokens == facts["batch_tokens"]
    assert own.max_sequences == facts["max_sequences"]
    assert own.block_size == facts["block_size"]
