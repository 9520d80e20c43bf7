"""The number format of forward and backward passes."""
