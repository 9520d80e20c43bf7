"""Strategies whose parameters are DTensors on one device mesh: FSDP2 and tensor parallelism."""
