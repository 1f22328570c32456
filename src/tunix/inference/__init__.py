"""The generation engine: continuous batching over slots of a key/value cache."""

from tunix.inference.engine import Engine
from tunix.inference.request import Completion, Request, SamplingParams

__all__ = ["Completion", "Engine", "Request", "SamplingParams"]
