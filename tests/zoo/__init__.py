"""Transformers models, built from their configurations, under every strategy."""
