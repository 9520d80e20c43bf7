"""Parity: every backend trains the same model to the same loss as a plain PyTorch loop."""
