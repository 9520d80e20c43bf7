"""Factories by name: the registry, the nodes that name them, and their signatures."""
