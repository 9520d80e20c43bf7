"""Checkpoints: directories, portable contents, and the state of a whole run."""
