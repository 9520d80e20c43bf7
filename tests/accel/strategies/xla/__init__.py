"""Tests of the XLA room."""
