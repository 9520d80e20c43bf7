"""Megatron-LM: megatron-core's parallel state, DistributedDataParallel, optimizer and schedules."""
