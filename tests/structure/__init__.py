"""Measure the structure of a checkout: which code names a strategy, sizes, cycles, tests, words."""
