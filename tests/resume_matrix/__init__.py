"""Runs that ended in every way, used in every way: ``python -m tests.resume_matrix``."""
