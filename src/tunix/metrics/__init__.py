"""Metric sinks: `metrics.jsonl`, TensorBoard."""
