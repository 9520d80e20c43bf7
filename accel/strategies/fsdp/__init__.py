"""Fully sharded training with FSDP2."""
