"""Experiment trackers: one file each, chosen by the table."""
