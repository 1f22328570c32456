"""SFT end to end on the tiny model, and the rows it refuses."""

import json

import jax
import numpy as np
import pytest

from tests.policies import tiny_policy
from tunix.algorithms.language import sft
from tunix.algorithms.language.sft import SFTConfig
from tunix.datasets.chats import RowEncoder
from tunix.environments.verifiable import BUILT_IN
from tunix.errors import ConfigError, DataError


def config(folder, **more):
    fields = dict(
        model="none", run_folder=str(folder), batch_size=4, max_tokens=64, tensorboard=False,
        learning_rate=1e-2, evaluation_interval=0,
    )  # fmt: skip
    return SFTConfig(**(fields | more))


def encode_row(policy, row, where):
    return RowEncoder(policy, 64, "error").encode(row, where)


def rows(number=10):
    return BUILT_IN["count_letters"].demonstrations(number, 0)


def test_the_trained_tokens_are_the_answer_and_its_end():
    """Of <bos><user>1+1=<end><assistant>2<end> only the last two are trained."""
    policy = tiny_policy()
    example = encode_row(policy, {"prompt": "1+1=", "completion": "2"}, "row 0")
    trained = example.tokens[example.action_mask]
    two = policy.tokenizer.encode("2")
    assert list(trained) == [*two, policy.tokenizer.eos_id]
    assert list(example.action_mask) == [False] * (len(example.tokens) - 2) + [True, True]


def test_each_row_is_trained_once_an_epoch(tmp_path):
    """Ten rows, none held out, batches of 4: 3 updates an epoch, the last one of 2 rows."""
    seen = []
    original = sft.pack_examples

    def spy(examples, settings):
        seen.append([e.tokens.tobytes() for e in examples])
        return original(examples, settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft, "pack_examples", spy)
        done = sft.train(
            config(tmp_path / "r", evaluation_fraction=0.0), policy=tiny_policy(), data=rows()
        )
    assert [len(batch) for batch in seen] == [4, 4, 2]
    assert sorted(row for batch in seen for row in batch) == sorted(
        encode_row(tiny_policy(), row, "").tokens.tobytes() for row in rows()
    )
    assert done.metrics[-1]["epoch"] == 1.0
    assert done.evaluations == []


def test_the_loss_falls_and_a_seed_fixes_the_run(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(60)))
    more = dict(data=str(path), steps=12, evaluation_fraction=0.1)
    one = sft.train(config(tmp_path / "a", **more), policy=tiny_policy())
    two = sft.train(config(tmp_path / "b", micro_batch_tokens=4096, **more), policy=tiny_policy())
    assert one.evaluations[-1]["loss"] < one.evaluations[0]["loss"] - 0.5
    assert one.evaluations[0]["rows"] == 6
    assert one.evaluations[0]["perplexity"] == pytest.approx(np.exp(one.evaluations[0]["loss"]))
    pairs = zip(jax.tree.leaves(one.policy.params), jax.tree.leaves(two.policy.params), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


def test_one_example_is_learned_to_its_end(tmp_path):
    """Overfitted on one row, greedy decoding says the completion and stops."""
    from tunix.inference.engine import Engine
    from tunix.inference.request import Request, SamplingParams
    from tunix.models.policy import answer_text, encode_task
    from tunix.types import Task

    data = [{"prompt": "ab?a=", "completion": "a1b|1"}] * 4
    run = sft.train(
        config(tmp_path / "r", steps=60, evaluation_fraction=0.0), policy=tiny_policy(), data=data
    )
    task = Task("t", messages=[{"role": "user", "content": "ab?a="}])
    sampling = SamplingParams(temperature=0.0, max_tokens=20, stop_ids=run.policy.stop_ids)
    with Engine(run.policy.config, run.policy.params, slots=8, max_positions=64) as engine:
        request = Request(encode_task(run.policy, task), sampling, 0)
        (answer,) = engine.generate_sync([request])
    assert answer.finish_reason == "stop"
    assert answer_text(run.policy, [int(t) for t in answer.tokens]) == "a1b|1"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1="}, "row 0: no field 'completion'"),
        ({"promt": "1=", "completion": "1"}, "row 0: no field 'prompt'.*did you mean 'promt'"),
        ({"prompt": 1, "completion": "1"}, "row 0: prompt and completion: expected texts"),
        ({"messages": []}, "row 0: messages: expected a list"),
        ({"messages": [{"role": "user", "content": "a"}]}, "row 0: .*no assistant message"),
        ({"messages": [{"role": "asistant", "content": "a"}]}, "unknown chat role 'asistant'"),
        ({"prompt": "1=", "completion": "1" * 90}, "row 0: .*more than max_tokens"),
    ],
)
def test_a_bad_row_is_refused(tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        sft.train(config(tmp_path / "r", too_long="error"), policy=tiny_policy(), data=[row])


def test_nothing_to_train_on_is_refused(tmp_path):
    with pytest.raises(DataError, match="the dataset is empty"):
        sft.train(config(tmp_path / "r"), policy=tiny_policy(), data=[])
    with pytest.raises(ConfigError, match="data: not set"):
        sft.train(config(tmp_path / "s"), policy=tiny_policy())
