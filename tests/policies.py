"""A tiny policy with a character tokenizer, in memory, for tests that play episodes."""

import jax

from tests.conftest import TINY
from tunix.environments.verifiable import ALPHABET
from tunix.models import llama
from tunix.models.policy import Policy
from tunix.text.tokenizer import Tokenizer


def tiny_policy(seed=7):
    tokenizer = Tokenizer.characters(ALPHABET)
    params = llama.initialize(jax.random.key(seed), TINY)
    assert tokenizer.eos_id is not None
    return Policy(TINY, params, tokenizer, frozenset({tokenizer.eos_id}))
