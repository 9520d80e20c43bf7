"""The scripts in `examples/`, run as their users run them."""
