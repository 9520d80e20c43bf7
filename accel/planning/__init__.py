"""From arguments and environment to one frozen plan; every conflict in one error."""
