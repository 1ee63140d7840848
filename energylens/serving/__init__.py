"""A service under traffic, simulated from event to event on predicted steps.

`serve` does everything; a `Replica` simulates one engine on any prices.
"""

from energylens.serving.batching import Replica, Simulation
from energylens.serving.prices import PriceTable, StepPricer, attention_pairs
from energylens.serving.service import (
    Limits,
    Service,
    kv_tokens,
    percentiles,
    serve,
    service_of,
    tpot_s,
)
from energylens.serving.traffic import (
    Requests,
    Traffic,
    read_arrivals,
    read_lengths,
    requests_of,
)

__all__ = [
    "Limits",
    "PriceTable",
    "Replica",
    "Requests",
    "Service",
    "Simulation",
    "StepPricer",
    "Traffic",
    "attention_pairs",
    "kv_tokens",
    "percentiles",
    "read_arrivals",
    "read_lengths",
    "requests_of",
    "serve",
    "service_of",
    "tpot_s",
]
