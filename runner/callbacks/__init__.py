"""Callbacks that a recipe switches on."""
