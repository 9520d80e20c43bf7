"""Sweeps over jobs."""
