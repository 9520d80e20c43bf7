"""Loaders, samplers and data sets that are shared out over processes."""
