"""What is asked of the engine and what comes back: a request, its sampling, a completion."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tunix.config import SamplingConfig
from tunix.errors import ConfigError

FinishReason = Literal["stop", "length", "aborted"]
"""A stop id was sampled or a stop string completed, a limit was reached, the caller gave up."""

MIN_TEMPERATURE = 1e-3
"""Below this, float32 logits over the temperature lose their meaning: 0 says it plainly."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn; unset filters have no effect.

    ``temperature`` divides the logits; 0 takes the likeliest token, the lowest id among equals,
    and ignores the filters. ``top_k`` keeps the k likeliest tokens, ``top_p`` of those the
    smallest set that holds this share of their mass, ``min_p`` the tokens at least this likely
    relative to the likeliest. Tokens that tie with the last one kept are kept. At most
    ``max_tokens`` are drawn, the stop token included.

    The completion ends with the first token after which its decoding, special tokens left out,
    contains a text of ``stop``: one token may bring the end of it and more, and the prompt is not
    searched. Ids and log-probabilities are kept up to and with that token; the answer's *text* is
    cut before the stop string, or behind it with ``include_stop`` (``text.stop.cut``). Raises
    ``ConfigError`` for values out of range.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    include_stop: bool = False

    def __post_init__(self) -> None:
        def check(good: bool, name: str, expected: str) -> None:
            if not good:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected {expected}")

        t = self.temperature
        check(self.max_tokens >= 1, "max_tokens", "at least 1")
        check(
            t == 0 or (math.isfinite(t) and t >= MIN_TEMPERATURE),
            "temperature",
            f"0 (greedy) or at least {MIN_TEMPERATURE}",
        )
        check(self.top_k is None or self.top_k >= 1, "top_k", "at least 1, or None for no limit")
        check(0 < self.top_p <= 1, "top_p", "a number above 0 and at most 1")
        check(0 <= self.min_p <= 1, "min_p", "a number from 0 to 1")
        check(all(i >= 0 for i in self.stop_ids), "stop_ids", "token ids, which are not negative")
        check(isinstance(self.stop, tuple) and all(self.stop), "stop", "texts that are not empty")

    @property
    def filtered(self) -> bool:
        """Whether drawing takes more than the tempered distribution as it is."""
        return self.temperature == 0 or self.top_k is not None or self.top_p < 1 or self.min_p > 0


def sampling_params(config: SamplingConfig, stop_ids: frozenset[int]) -> SamplingParams:
    """Return how a config wants completions drawn; a policy's stop set ends them."""
    return SamplingParams(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        max_tokens=config.max_completion_tokens,
        stop_ids=stop_ids,
        stop=tuple(config.stop or ()),
        include_stop=config.include_stop,
    )


def check_context(config: SamplingConfig, context: int) -> None:
    """Raise ``ConfigError`` where the longest prompt and answer exceed the model's context."""
    prompt, answer = config.max_prompt_tokens, config.max_completion_tokens
    if prompt + answer > context:
        raise ConfigError(
            f"max_prompt_tokens + max_completion_tokens: {prompt} + {answer} = {prompt + answer}, "
            f"more than the model's context of {context}"
        )


def derived_seed(seed: int, index: int) -> int:
    """A seed of 64 bits that is a function of another one and a number."""
    name = f"{seed}\n{index}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")


@dataclass(frozen=True)
class Request:
    """A prompt as token ids, how to go on from it, and the seed of its random numbers.

    The completion is a function of these and the weights. The token at absolute position p
    is drawn with the random number ``(seed, p)``: samples of one prompt need different seeds.
    Raises ``ConfigError`` for an empty prompt or a seed outside [0, 2**64).
    """

    tokens: list[int]
    sampling: SamplingParams
    seed: int
    adapter: int = 0
    """Which of the engine's adapters answers, from 1; 0 is the bare base."""

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ConfigError("the prompt has no token: the first token needs one to follow")
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed is {self.seed}, expected 0 <= seed < 2**64")

    def samples(self, n: int) -> list[Request]:
        """Return the request ``n`` times; sample i's seed is a function of (``seed``, i).

        The engine reads their prompt once. Raises ``ConfigError`` for ``n`` below 1.
        """
        if n < 1:
            raise ConfigError(f"samples is {n}, expected at least 1")
        return [replace(self, seed=derived_seed(self.seed, i)) for i in range(n)]


@dataclass(frozen=True)
class Completion:
    """The tokens drawn for a request, a final stop token included. All arrays are ``[length]``.

    ``logprobs`` are nats under the tempered distribution with full support (under temperature 1
    for greedy requests). ``log_kept`` is the log of the mass that the filters kept, 0 where there
    are none: a token was drawn with log-probability ``logprobs - log_kept``. ``versions`` are the
    weights that drew each token, ``prefill_version`` the weights that read the prompt (-1 if an
    abort came first).
    """

    tokens: np.ndarray  # int32
    logprobs: np.ndarray  # float32
    log_kept: np.ndarray  # float32, <= 0
    versions: np.ndarray  # int32
    prefill_version: int
    finish_reason: FinishReason
