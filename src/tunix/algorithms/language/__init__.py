"""Algorithms for language models."""
