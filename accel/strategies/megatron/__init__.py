"""Megatron-LM, which is not built yet: its spec refuses it by name."""
