"""Data sets, their order, and windows of micro-batches."""
