"""The generation engine: continuous batching over slots of a key/value cache."""
