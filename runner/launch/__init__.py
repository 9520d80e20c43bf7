"""Processes, their rendezvous, signals and failures."""
