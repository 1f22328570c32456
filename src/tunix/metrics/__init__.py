"""Metric sinks: `metrics.jsonl`, TensorBoard, trackers."""
