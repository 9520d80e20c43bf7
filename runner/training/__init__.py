"""The training loop, its steps and what it keeps."""
