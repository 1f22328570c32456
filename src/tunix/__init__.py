"""tunix: JAX-native post-training of language models and control policies."""

__version__ = "0.1.0"
