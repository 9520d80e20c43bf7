"""From a recipe to objects, and every check before the start."""
