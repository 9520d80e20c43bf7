"""Use of a finished run: load, evaluate, predict."""
