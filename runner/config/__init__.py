"""The typed schema of a recipe, and torch-free arithmetic on it."""
