"""The generation engine: continuous batching over slots of a key/value cache."""

from tunix.inference.engine import Engine, Piece
from tunix.inference.request import Completion, Request, SamplingParams

__all__ = ["Completion", "Engine", "Piece", "Request", "SamplingParams"]
