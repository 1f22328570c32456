"""Stop strings in the engine: ids, log-probabilities and text end by one rule."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from tests.inference.replay import assert_same, run
from tests.policies import tiny_policy
from tunix.environments.base import SingleTurn
from tunix.errors import ConfigError
from tunix.inference import Engine, Request, SamplingParams
from tunix.inference.scheduler import Scheduler
from tunix.models.policy import Policy, answer_text
from tunix.profiling.spans import Spans
from tunix.rollout.collector import Collector
from tunix.rollout.episode import EpisodeRunner
from tunix.text.detokenize import byte_alphabet
from tunix.text.tokenizer import Tokenizer
from tunix.types import Task

SIZES = {"slots": 8, "max_positions": 64}


def odd_tokenizer() -> Tokenizer:
    """Ninety-six tokens of one to three letters, and the halves of "é" as tokens of their own."""
    spelled = {byte: token for token, byte in byte_alphabet().items()}
    high, low = (spelled[byte] for byte in "é".encode())
    tokens = ["a", "b", *(x + high for x in "abcdefghij"), *(low + x for x in "abcdefghij")]
    tokens += [x + y + z for x in "abc" for y in "abc" for z in "abcde"] + [high, low]
    tokens += [x + y for x in "defgh" for y in "abcdefg"]
    backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens[:96])}, []))
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return Tokenizer(backend)


TOKENIZER = odd_tokenizer()


@pytest.fixture(scope="module")
def flat(tiny_params):
    """Weights under which every token is as likely as any other."""
    return jax.tree.map(np.zeros_like, tiny_params)


def test_ids_logprobs_and_text_end_by_one_rule(tiny_config, flat):
    """Stops taken from what was drawn without them: across tokens, within one, within "é".

    Expected is the slow rule: the shortest prefix of ids whose decoding has the stop string.
    """
    scheduler = Scheduler(tiny_config, flat, tokenizer=TOKENIZER, **SIZES)
    policy = Policy(tiny_config, flat, TOKENIZER, frozenset())
    rng = np.random.default_rng(0)
    free = [Request([i + 1] * 5, SamplingParams(max_tokens=24), i) for i in range(40)]
    wholes = run(scheduler, free)
    asked, sizes, kinds = [], [], set()
    for request, whole in zip(free, wholes, strict=True):
        text = TOKENIZER.decode(whole.tokens)
        at = int(rng.integers(0, len(text) - 3))
        stop = text[at : at + int(rng.integers(1, 4))]
        size = next(n for n in range(1, 25) if stop in TOKENIZER.decode(whole.tokens[:n]))
        so_far, last = (TOKENIZER.decode(whole.tokens[:n]) for n in (size, size - 1))
        inside_one = stop in TOKENIZER.decode(whole.tokens[size - 1 : size])
        kinds.add("inside one token" if inside_one else "across tokens")
        kinds.add("ends a token" if so_far.endswith(stop) else "ends within a token")
        kinds.add("characters of several tokens" if last.endswith("\ufffd") else "whole")
        how = SamplingParams(max_tokens=24, stop=("never", stop), include_stop=bool(at % 2))
        asked.append(Request(request.tokens, how, request.seed))
        sizes.append(size)
    assert len(kinds) == 6
    together = run(scheduler, asked)
    for request, whole, size, done in zip(asked, wholes, sizes, together, strict=True):
        assert done.finish_reason == "stop"
        np.testing.assert_array_equal(done.tokens, whole.tokens[:size])
        np.testing.assert_array_equal(done.logprobs, whole.logprobs[:size])
        assert len(done.tokens) == len(done.logprobs) == len(done.log_kept) == len(done.versions)
        how = request.sampling
        text = answer_text(policy, done.tokens, how.stop, how.include_stop)
        before, _, _ = TOKENIZER.decode(done.tokens).partition(how.stop[1])
        assert text == before + (how.stop[1] if how.include_stop else "")
    for i in range(0, 40, 5):
        fresh = Scheduler(tiny_config, flat, tokenizer=TOKENIZER, **SIZES)
        assert_same(run(fresh, [asked[i]])[0], together[i])


def test_the_prompt_is_not_searched(tiny_config, flat):
    """Greedy under flat logits draws id 0, the letter a, for ever; the prompt ends in b."""
    scheduler = Scheduler(tiny_config, flat, tokenizer=TOKENIZER, **SIZES)

    def answer(stop):
        how = SamplingParams(max_tokens=6, temperature=0.0, stop=(stop,))
        (done,) = run(scheduler, [Request([1, 1], how, 0)])
        return done.finish_reason, len(done.tokens)

    assert answer("ba") == ("length", 6)
    assert answer("bb") == ("length", 6)
    assert answer("aaa") == ("stop", 3)
    assert answer("ab") == ("length", 6)  # and nothing is left of the request before


def test_refusals(tiny_config, flat):
    how = SamplingParams(max_tokens=1, stop=("a",))
    with pytest.raises(ConfigError, match=r"stop is \('a',\), but the engine has no tokenizer"):
        Scheduler(tiny_config, flat, **SIZES).submit(Request([1], how, 0), print)
    with pytest.raises(ConfigError, match=r"stop is \('a', ''\), expected texts that are not empt"):
        SamplingParams(max_tokens=1, stop=("a", ""))
    with pytest.raises(ConfigError, match="samples is 0, expected at least 1"):
        Request([1], how, 0).samples(0)


def test_samples_of_one_request_differ_and_repeat(tiny_config, flat):
    scheduler = Scheduler(tiny_config, flat, **SIZES)
    request = Request([3] * 20, SamplingParams(max_tokens=8), seed=5)
    eight = run(scheduler, request.samples(8))
    assert scheduler.stats.prefill_tokens == 19  # one prompt is read once
    assert len({tuple(c.tokens) for c in eight}) == 8
    for one, other in zip(eight, run(scheduler, request.samples(12))[:8], strict=True):
        assert_same(one, other)
    others = run(scheduler, Request(request.tokens, request.sampling, 6).samples(8))
    assert not {tuple(c.tokens) for c in others} & {tuple(c.tokens) for c in eight}


def test_an_episode_keeps_every_id_and_the_text_before_the_stop_string(tiny_config):
    """What is trained on: the ids drawn without stop strings, up to the letter that completes."""
    policy = tiny_policy()
    task = Task("t", messages=[{"role": "user", "content": "1+1="}])
    how = SamplingParams(max_tokens=30, stop_ids=policy.stop_ids)

    def play(sampling):
        runner = EpisodeRunner(policy, engine, SingleTurn, 16, 64, 20.0, Spans())
        return Collector(runner, (), sampling, 16, seed=0).collect([(task, 0)])[0].trajectories

    with Engine(tiny_config, policy.params, tokenizer=policy.tokenizer, **SIZES) as engine:
        stopped = 0
        for free, short in zip(play(how), play(replace(how, stop=("e", "+"))), strict=True):
            end = min((free.text.find(s) for s in "e+" if s in free.text), default=None)
            assert short.text == short.messages[-1]["content"] == free.text[:end]
            size = len(short.tokens)
            np.testing.assert_array_equal(short.tokens, free.tokens[:size])
            np.testing.assert_array_equal(short.logprobs, free.logprobs[:size])
            assert short.status == (free.status if end is None else "finished")
            if end is not None:
                stopped += 1
                last = short.tokens[-1:]
                assert policy.tokenizer.decode(last) == free.text[end]
        assert stopped > 2
