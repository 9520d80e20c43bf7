"""Files of a run directory, written and read."""
