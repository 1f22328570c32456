"""Rewards on answers worked out by hand."""

import numpy as np
import pytest

from tunix.errors import ConfigError
from tunix.rewards.resolve import resolve_reward
from tunix.types import Task, Trajectory


def judge(name, text, answer):
    empty = np.zeros(0)
    episode = Trajectory("t", 0, empty, empty, empty, empty, empty, text=text)
    return resolve_reward(name)(Task("t", text="?", answer=answer), episode)


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
        ("after:####", "so\n#### 12", "12", 1),
        ("after:####", "12", "12", 0),
        (r"regex:^\{.*\}$", '{"a": 1}', None, 1),
        (r"regex:^\{.*\}$", "no", None, 0),
        (r"regex:answer: (\w+)", "answer: b, no, answer: c", "c", 1),
        (r"regex:answer: (\w+)", "answer: b, no, answer: c", "b", 0),
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
        ("json:dumsp", "has no 'dumsp'.*did you mean 'dump"),
    ],
)
def test_a_wrong_name_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        resolve_reward(name)
