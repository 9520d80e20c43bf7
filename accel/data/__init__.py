"""Loaders, samplers and data sets that are sharded over processes."""
