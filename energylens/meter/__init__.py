"""Measured energy: recorders of board sensors, and what a window of their samples is worth."""
