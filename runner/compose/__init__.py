"""From a command line to a recipe, by Hydra."""
