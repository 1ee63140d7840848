"""The errors that EnergyLens raises on purpose; each carries one line that says what to change."""

from __future__ import annotations


class EnergyLensError(Exception):
    """Root of every error that EnergyLens raises on purpose.

    Attributes:
        exit_code: process exit code of the command line for this kind of error (DESIGN section 5).
    """

    exit_code = 1


class SpecError(EnergyLensError, ValueError):
    """A file or an argument is wrong: where, what was found, what is allowed, what to change."""

    exit_code = 2


class UnsupportedError(EnergyLensError):
    """The input is well formed, but EnergyLens cannot do this (an engine without a profile)."""

    exit_code = 2


class OutOfRangeError(EnergyLensError, ValueError):
    """A number lies outside of what is physically or logically possible."""

    exit_code = 2


class CalibrationError(EnergyLensError):
    """Samples or a bundle cannot be used: truncated, altered, of another device or power limit."""

    exit_code = 2


class MeterError(EnergyLensError, RuntimeError):
    """Energy cannot be measured here; the text says which sensor failed and why."""

    exit_code = 4
