"""Microbenchmarks: what is measured (`plan`), how (`trial`) and in which order (`calibrate`)."""
