"""Training on TPUs through torch_xla."""
