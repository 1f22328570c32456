"""SFT end to end on the tiny model, and the rows it refuses."""

import json

import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.policies import tiny_policy
from tunix.algorithms.language import sft
from tunix.algorithms.language.sft import SFTConfig, positions
from tunix.config_parsing import load_config
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
    with pytest.raises(DataError, match=r"\*\.parquet matches no file"):
        sft.train(config(tmp_path / "t", data=str(tmp_path / "*.parquet")), policy=tiny_policy())


class Messages:
    """An observer that keeps what a person is told."""

    def __init__(self):
        self.texts = []

    def message(self, text):
        self.texts.append(text)

    def start(self, run_folder, total_steps, first_step): ...

    def step(self, metrics, times): ...

    def evaluation(self, step, metrics): ...

    def close(self): ...


def test_what_is_trained_is_said_before_it_begins(tmp_path):
    """A row is 6 tokens of prompt, then its completion and an end: 8, 8, 9 and 9 tokens."""
    told = Messages()
    data = [{"prompt": "1=", "completion": c} for c in ("1", "1", "22", "22")]
    settings = config(tmp_path / "r", evaluation_fraction=0.4, steps=1)
    sft.train(settings, policy=tiny_policy(), data=data, observers=[told])
    assert told.texts[0] == (
        "data: 4 rows, 34 tokens, 10 trained; row length min 8, median 8, p95 9, max 9"
    )
    assert told.texts[1] == "held out: 1 rows; copies of them left out: 1"
    assert told.texts[2].startswith("first row, [[trained]]: <|bos|><|user|>1=<|end|><|assistant|>")
    assert told.texts[2].endswith("<|end|>]]")


def test_parquet_trains_as_jsonl_does(tmp_path):
    """Other columns, another format, two files: the same rows give the same numbers."""
    made = rows(12)
    whole = tmp_path / "whole.jsonl"
    whole.write_text("".join(json.dumps(row) + "\n" for row in made))
    other = [{"q": row["prompt"], "a": row["completion"]} for row in made]
    for i in (0, 1):
        table = pyarrow.Table.from_pylist(other[6 * i : 6 * i + 6])
        pyarrow.parquet.write_table(table, tmp_path / f"{i}.parquet")
    one = sft.train(config(tmp_path / "a", data=str(whole), steps=2), policy=tiny_policy())
    two = sft.train(
        config(
            tmp_path / "b", data=[str(tmp_path / "*.parquet")], steps=2,
            prompt_field="q", completion_field="a",
        ),
        policy=tiny_policy(),
    )  # fmt: skip
    assert [m["loss"] for m in one.metrics] == [m["loss"] for m in two.metrics]


def test_steps_go_on_into_further_passes(tmp_path):
    """Ten rows in fours: with epochs the last batch is short, with steps all are full."""
    by_epochs, by_steps = config(tmp_path, epochs=1), config(tmp_path, steps=4)
    assert [positions(by_epochs, i, 10) for i in range(3)] == [range(4), range(4, 8), range(8, 10)]
    assert [positions(by_steps, i, 10) for i in (2, 3)] == [range(8, 12), range(12, 16)]


def test_held_out_rows_are_evaluated_in_parts(tmp_path, monkeypatch):
    """Five rows at once, or two, two and one: the mean over all tokens is the same."""
    held_out = tmp_path / "held.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows(5)))
    found = []
    for most in (256, 2):
        monkeypatch.setattr(sft, "MOST_HELD_OUT", most)
        settings = config(tmp_path / str(most), evaluation_data=str(held_out), steps=1)
        found.append(sft.train(settings, policy=tiny_policy(), data=rows(4)).evaluations[0])
    assert found[0]["rows"] == 5
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-6)


def test_a_resumed_run_keeps_the_date(tmp_path, monkeypatch):
    """The template writes microseconds, and still each row is that of the first pass."""
    seen = []
    original = sft.pack_examples
    monkeypatch.setattr(
        sft, "pack_examples", lambda rows, more: seen.extend(rows) or original(rows, more)
    )
    policy = tiny_policy()
    policy.tokenizer.chat_template = "{{ strftime_now('%M%S%f') }}" + policy.tokenizer.chat_template
    for steps in (1, 2):
        more = dict(steps=steps, resume=steps == 2, evaluation_fraction=0.0)
        sft.train(config(tmp_path / "r", **more), policy=policy, data=rows())
    assert len(seen) == 8
    assert len({policy.tokenizer.decode(one.tokens).partition("<")[0] for one in seen}) == 1


def test_columns_are_checked_before_a_folder_is_made(tmp_path):
    twice = config(tmp_path / "r", data="arithmetic", prompt_field="completion")
    with pytest.raises(ConfigError, match="prompt_field, completion_field: 'completion'; expected"):
        sft.train(twice, policy=tiny_policy())
    assert not (tmp_path / "r").exists()
    mapped = config(tmp_path / "s", data="arithmetic", prompt_field="question")
    with pytest.raises(ConfigError, match="the built-in 'arithmetic' has fixed columns"):
        sft.train(mapped, policy=tiny_policy())


@pytest.mark.parametrize(
    ("words", "wanted"),
    [("a.jsonl", "a.jsonl"), ("[a.jsonl, b/*.parquet]", ["a.jsonl", "b/*.parquet"])],
)
def test_files_are_one_or_a_list_on_the_command_line(words, wanted):
    assert load_config(SFTConfig, None, ["--model", "m", "--data", words]).data == wanted
