"""Run a real model and measure it: the ground truth that predictions are held against."""

from energylens.profiler.loader import LOADERS, LoadedModel, Loader, Place, Source
from energylens.profiler.options import ProfileRequest
from energylens.profiler.session import METERS, METRICS, Engine, MetricInput, Session

__all__ = [
    "LOADERS",
    "METERS",
    "METRICS",
    "Engine",
    "LoadedModel",
    "Loader",
    "MetricInput",
    "Place",
    "ProfileRequest",
    "Session",
    "Source",
]
