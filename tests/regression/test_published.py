"""Predictions against others' published measurements; skipped where ../shared is absent."""

import csv
from pathlib import Path

import pytest

from energylens.predict import Catalogue, predict
from energylens.spec.system import Config, Mode, Phase, Workload

ELANA = Path(__file__).parents[3] / "shared" / "data" / "public" / "elana_tables.csv"
METRICS = {
    "ttft": ("prefill", "latency_s", 1e-3),
    "energy_per_prompt_batch": ("prefill", "energy_j", 1.0),
    "tpot": ("decode", "latency_s", 1e-3),
    "energy_per_decode_step_batch": ("decode", "energy_j", 1.0),
    "ttlt": ("request", "latency_s", 1e-3),
    "energy_per_request_batch": ("request", "energy_j", 1.0),
}


def a6000_rows():
    if not ELANA.exists():
        return []
    with ELANA.open(newline="", encoding="utf-8") as file:
        return [
            r
            for r in csv.DictReader(file)
            if r["hardware"] == "NVIDIA RTX A6000 48GB"
            and float(r["n_gpu"]) == 1
            and r["model"] == "Llama-3.1-8B"
            and r["metric"] in METRICS
        ]


@pytest.mark.skipif(not ELANA.exists(), reason="published tables are not beside the checkout")
def test_the_roofline_interval_of_an_uncalibrated_a6000_holds_what_elana_measured():
    rows = a6000_rows()
    assert len(rows) >= 6
    catalogue = Catalogue()
    spec, engine = catalogue.spec("llama3_8b"), catalogue.engine("hf")
    device = catalogue.device("a6000")
    for row in rows:
        batch, prompt, gen = (int(float(row[k])) for k in ("batch", "prompt_len", "gen_len"))
        found = predict(
            spec,
            engine=engine,
            device=device,
            config=Config(modes={Phase.DECODE: Mode.CUDA_GRAPH}),
            workload=Workload(batch=batch, prompt_len=prompt, gen_len=gen),
        )
        phase, field, scale = METRICS[row["metric"]]
        result = found.phases[phase]
        low, high = getattr(result.interval, field)
        measured = float(row["value"]) * scale
        assert low <= measured <= high, (row["record_id"], row["metric"], measured, (low, high))
        # An unfitted roofline was within 10 % here; twice that would mean that something broke.
        assert getattr(result, field) == pytest.approx(measured, rel=0.2), row["metric"]
