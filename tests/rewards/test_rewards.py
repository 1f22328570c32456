"""Rewards on answers worked out by hand."""

import json
import threading
import time

import numpy as np
import pytest

from tunix.errors import ConfigError
from tunix.rewards import mathematics
from tunix.rewards.resolve import LIBRARIES, WeightedReward, resolve_reward, resolve_rewards
from tunix.types import Task, Trajectory


def episode(text, tokens=0):
    empty, mask = np.zeros(0), np.ones(tokens, bool)
    return Trajectory("t", 0, empty, mask, empty, empty, empty, text=text)


def judge(name, text, answer=None, tokens=0):
    return resolve_reward(name)(Task("t", text="?", answer=answer), episode(text, tokens))


@pytest.mark.parametrize(
    ("name", "text", "answer", "reward"),
    [
        ("exact_match", " 42\n", "42", 1),
        ("exact_match", "42.", "42", 0),
        ("exact_match", "", "", 1),
        ("last_number", "3 + 4 equals 7.", 7, 1),
        ("last_number", "7 is 3 + 4", 7, 0),
        ("last_number", "it costs 1,234.50", "1234.5", 1),
        ("last_number", "minus -3", "-3", 1),
        ("last_number", "none", 0, 0),
        ("last_number", "3-5", 5, 1),
        ("last_number", "(3)-5", -5, 0),
        ("last_number", "x=-5", -5, 1),
        ("last_number", "1,2", 12, 0),
        ("last_number", "1,2", 2, 1),
        ("last_number", "1,2", "1,2", 0),
        ("last_number", "12,345,678", "12,345,678", 1),
        ("last_number", "1,2345", 2345, 1),
        ("last_number", "10000,200", 200, 1),
        ("last_number", "1000", "1e3", 1),
        ("after:####", "so\n#### 12", "12", 1),
        ("after:####", "12", "12", 0),
        (r"regex:^\{.*\}$", '{"a": 1}', None, 1),
        (r"regex:^\{.*\}$", "no", None, 0),
        (r"regex:answer: (\w+)", "answer: b, no, answer: c", "c", 1),
        (r"regex:answer: (\w+)", "answer: b, no, answer: c", "b", 0),
        ("format:<answer>.*</answer>", " <answer>4\n2</answer>\n", None, 1),
        ("format:<answer>.*</answer>", "so <answer>42</answer>", None, 0),
        ("format:a|ab", "ab", None, 1),
        ("json:dumps", None, None, None),
    ],
)
def test_rewards(name, text, answer, reward):
    if reward is None:
        assert callable(resolve_reward(name))
    else:
        assert judge(name, text, answer) == reward


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact_mach", "unknown name 'exact_mach'.*did you mean 'exact_match'"),
        ("regex:(", "not a regular expression"),
        ("no_such_module:reward", "cannot import 'no_such_module'"),
        ("format:(", "not a regular expression"),
        ("length:0", "length:0; expected a whole number of tokens, at least 1"),
        ("length:1.5", "length:1.5; expected"),
        ("length:", "unknown name 'length:'.*length:TOKENS"),
        ("math:3", "unknown name 'math:3'.*did you mean 'math'"),
        ("json_schema:no_such_file.json", "json_schema:no_such_file.json cannot be read"),
        ("json:dumsp", "has no 'dumsp'.*did you mean 'dump"),
    ],
)
def test_a_wrong_name_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        resolve_reward(name)


@pytest.mark.parametrize(
    ("tokens", "reward"), [(0, 1), (10, 1), (11, 0.9), (15, 0.5), (20, 0), (50, 0)]
)
def test_length_falls_linearly_from_n_to_two_n(tokens, reward):
    assert judge("length:10", "", tokens=tokens) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("The answer is $0.5$.", r"\frac{1}{2}", 1),
        (r"so \boxed{\frac{2}{4}}", r"$\frac{1}{2}$", 1),
        ("it is 0.75", "3/4", 1),
        ("$1+x$", "x+1", 1),
        (r"$2\sqrt{2}$", r"\sqrt{8}", 1),
        ("$0.5$, no, $0.6$", r"\frac{1}{2}", 0),
        ("no idea", 42, 0),
        ("1234", "1,234", 1),
    ],
)
def test_math_is_equality_of_what_the_expressions_mean(text, answer, reward):
    assert judge("math", text, answer) == reward


def test_math_says_that_an_answer_is_no_mathematics():
    with pytest.raises(RuntimeError, match=r"task.answer '' holds no mathematical expression"):
        judge("math", "42", "")


def test_a_power_tower_ends_only_its_own_verdict(monkeypatch):
    """Such a computation holds the interpreter: elsewhere this thread would stand still."""
    monkeypatch.setattr(mathematics, "SECONDS", 1)
    while not mathematics._idle.empty():
        mathematics._idle.get()  # processes of other tests, with their limit
    mathematics._idle.put(None)
    errors = []

    def ask():
        try:
            judge("math", "$9^{9^{9^{9}}}$", "7")
        except TimeoutError as error:
            errors.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    longest = 0.0
    while thread.is_alive():
        before = time.monotonic()
        time.sleep(0.01)
        longest = max(longest, time.monotonic() - before)
    assert errors == ["no verdict within 1 s"]
    assert longest < 0.9
    assert judge("math", "$7$", "7") == 1


@pytest.fixture
def schema(tmp_path):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps({"type": "object", "required": ["a"],
                                "properties": {"a": {"type": "integer"}}}))  # fmt: skip
    return path


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (' {"a": 1}\n', 1),
        ('{"a": "1"}', 0),
        ('{"a": 1', 0),
        ('Here:\n```json\n{"a": 1}\n```\nDone.', 1),
        ('```json\n{"a": 1}\n``` or\n```json\n{"a": 1}\n```', 0),
        ('Here: {"a": 1}', 0),
        ("[" * 100_000, 0),
    ],
)
def test_json_schema(schema, text, reward):
    assert judge(f"json_schema:{schema}", text) == reward


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot be read: Expecting"), ('{"type": "objekt"}', "holds no JSON schema: 'objekt'")],
)
def test_a_file_without_a_schema_is_refused(schema, text, message):
    schema.write_text(text)
    with pytest.raises(ConfigError, match=message):
        resolve_reward(f"json_schema:{schema}")


@pytest.mark.parametrize("name", ["math", "json_schema:x.json"])
def test_a_missing_library_is_said_with_its_extra(name, monkeypatch):
    monkeypatch.setitem(LIBRARIES, name.partition(":")[0], "no_such_library")
    with pytest.raises(ConfigError, match=r"needs no_such_library.*pip install 'tunix\[rewards\]'"):
        resolve_reward(name)


def test_several_have_names_and_weights():
    two = resolve_rewards({"exact_match": 1.0, "length:5": -0.5})
    assert [(r.name, r.weight) for r in two] == [("exact_match", 1), ("length:5", -0.5)]
    assert resolve_rewards("exact_match") == [WeightedReward("reward", two[0].function)]
    with pytest.raises(ConfigError, match="names none"):
        resolve_rewards({})
