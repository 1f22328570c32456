"""Packing, order, task files and the held-out split."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunix.datasets.batch import Sequence, micro_batches, pack, round_up, row_length
from tunix.datasets.order import ShuffledOrder
from tunix.datasets.tasks import hold_out, tasks
from tunix.environments.verifiable import BUILT_IN, held_out
from tunix.errors import DataError
from tunix.types import Task


def sequence(size, seed=0):
    rng = np.random.default_rng(seed)
    mask = rng.random(size) < 0.5
    mask[0] = False
    arrays = {"advantages": rng.normal(size=size)}
    return Sequence(rng.integers(1, 90, size).astype(np.int32), mask, rng.normal(size=size), arrays)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    length=st.integers(30, 80),
    micro=st.integers(1, 400),
)
def test_packing_keeps_every_sequence_whole(sizes, length, micro):
    """Each sequence is found again, once, in one row, with its arrays, positions from 0."""
    given_sequences = [sequence(size, i) for i, size in enumerate(sizes)]
    found = []
    for part in micro_batches(pack(given_sequences, length), micro):
        assert part.shape[0] * length <= max(micro, length)
        for row in range(part.shape[0]):
            for segment in range(1, int(part.segment_ids[row].max()) + 1):
                (where,) = np.nonzero(part.segment_ids[row] == segment)
                assert (np.diff(where) == 1).all()
                np.testing.assert_array_equal(part.positions[row, where], np.arange(len(where)))
                columns = (part.tokens, part.action_mask, part.weights, part.advantages)
                found.append(tuple(c[row, where].tobytes() for c in columns))
        assert not part.action_mask[part.segment_ids == 0].any()
    wanted = [
        tuple(a.tobytes() for a in (s.tokens, s.action_mask, s.weights, s.arrays["advantages"]))
        for s in given_sequences
    ]
    assert sorted(found) == sorted(wanted)


def test_the_first_token_of_a_sequence_is_never_an_action():
    one = Sequence(np.array([5, 6], np.int32), np.array([True, True]), np.ones(2))
    np.testing.assert_array_equal(pack([one], 4).action_mask, [[False, True, False, False]])


def test_a_sequence_longer_than_the_row_is_refused():
    with pytest.raises(ValueError, match="9 tokens does not fit a row of 8"):
        pack([sequence(9)], 8)


def test_unknown_arrays_become_extras():
    one = Sequence(np.ones(2, np.int32), np.ones(2, bool), np.ones(2), {"values": np.full(2, 3.0)})
    np.testing.assert_array_equal(pack([one], 2).extras["values"], [[3.0, 3.0]])


def test_row_lengths_come_from_a_small_set():
    assert len({row_length(n, 4096) for n in range(1, 8193)}) <= 15
    assert all(row_length(n, 64) >= n for n in range(1, 9000, 7))
    assert round_up(9000, (64, 8192)) == 16384


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 40), seed=st.integers(0, 100))
def test_each_pass_holds_each_item_once(size, seed):
    order = ShuffledOrder(size, seed)
    for epoch in range(3):
        drawn = [order[epoch * size + i] for i in range(size)]
        assert sorted(index for index, _ in drawn) == list(range(size))
        assert {e for _, e in drawn} == {epoch}


def test_order_is_a_function_of_the_seed_and_the_position():
    one, two, other = ShuffledOrder(50, 1), ShuffledOrder(50, 1), ShuffledOrder(50, 2)
    assert [one[i] for i in range(100)] == [two[i] for i in reversed(range(100))][::-1]
    assert [one[i] for i in range(50)] != [other[i] for i in range(50)]
    assert [one[i][0] for i in range(50)] != [one[i][0] for i in range(50, 100)]


def test_an_empty_dataset_is_refused():
    with pytest.raises(DataError, match="empty"):
        ShuffledOrder(0, 0)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_task_columns_are_mapped(tmp_path):
    path = write(tmp_path / "t.jsonl", [{"question": "1+1", "solution": 2, "level": "easy"}])
    (task,) = tasks(path, prompt="question", answer="solution", system="Be brief.")
    assert task.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1"},
    ]
    assert (task.answer, task.info, task.id) == (2, {"level": "easy"}, "t.jsonl:1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no rows"),
        ('{"prompt": "a"}\n{"promt": "b"}\n', "t.jsonl:2: no field 'prompt'.*did you mean 'promt'"),
        ('{"prompt": "a"}\nnonsense\n', "t.jsonl:2: not JSON"),
        ("[1]\n", "t.jsonl:1: expected a JSON object"),
        ('{"prompt": 3}\n', "t.jsonl:1.*expected a text or a list of chat messages, got 3"),
    ],
)
def test_a_bad_task_file_is_refused_by_file_and_line(tmp_path, text, message):
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        tasks(path)


def test_a_missing_file_is_refused_with_the_nearest_name(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"no such file.*did you mean 'train.jsonl'"):
        tasks(tmp_path / "trian.jsonl")


@settings(max_examples=50, deadline=None)
@given(names=st.lists(st.integers(0, 30), min_size=2, max_size=60), size=st.integers(1, 20))
def test_held_out_tasks_are_never_trained_on(names, size):
    """Equal prompts stay on one side, nothing is lost, and training is never empty."""
    made = [Task(str(i), text=f"prompt {n}") for i, n in enumerate(names)]
    training, kept = hold_out(made, size)
    assert {t.text for t in training}.isdisjoint({t.text for t in kept})
    assert sorted(int(t.id) for t in training + kept) == list(range(len(made)))
    assert training
    assert len(kept) <= size


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_tasks(name):
    """Distinct, split by prompt, and every demonstration is judged right by the task's reward."""
    family = BUILT_IN[name]
    held, training = family.tasks(256, 0, "held_out"), family.tasks(500, 0)
    assert len({t.id for t in held}) == 256
    assert all(held_out(t.messages[0]["content"]) for t in held)
    assert {t.id for t in held}.isdisjoint({t.id for t in training})
    assert training == family.tasks(500, 0)
    answers = {t.messages[0]["content"]: t.answer for t in training}
    for row in family.demonstrations(300, 0):
        assert not held_out(row["prompt"])
        assert (
            answers.get(row["prompt"], row["completion"].rpartition("|")[2])
            == (row["completion"].rpartition("|")[2])
        )


def test_arithmetic_work_is_right():
    for task in BUILT_IN["arithmetic"].tasks(200, 1):
        a, b = task.messages[0]["content"][:-1].split("+")
        assert int(task.answer) == int(a) + int(b)
        digits = [part[-1] for part in task.info["work"].split(" ")]
        top = task.info["work"].split(" ")[-1][-2]
        assert int(top + "".join(reversed(digits))) == int(a) + int(b)
