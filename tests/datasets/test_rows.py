"""Rows by index from JSONL and Parquet files of any size, one or many; bad files are refused."""

import json
import random
import sys

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunix.config import PolicyGradientConfig
from tunix.datasets import parquet
from tunix.datasets.rows import ListedRows, find_files, open_rows
from tunix.datasets.tasks import names_files, tasks
from tunix.errors import ConfigError, DataError
from tunix.training.on_policy import task_source

ROWS = [{"id": i, "messages": [{"role": "user", "content": f"ä{i}"}]} for i in range(25)]


def write_jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path, rows=ROWS, group=4):
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, path, row_group_size=group)
    return path


def read(files):
    """All rows, in an order that has nothing to do with theirs."""
    rows = open_rows(files)
    order = random.Random(0).sample(range(len(rows)), len(rows))
    found = {i: rows[i] for i in order}
    return [found[i] for i in range(len(rows))]


def test_both_formats_give_the_same_rows(tmp_path):
    assert read(write_jsonl(tmp_path / "a.jsonl")) == ROWS
    assert read(write_parquet(tmp_path / "a.parquet")) == ROWS


def test_a_key_that_is_null_in_a_parquet_object_is_absent(tmp_path):
    """Parquet gives all structs of a column the same keys: a call's city must not become null."""
    calls = [{"a": {"city": "x"}}, {"a": {"day": 1}}]
    found = read(write_parquet(tmp_path / "a.parquet", [{"calls": calls, "b": None}]))
    assert found == [{"calls": calls, "b": None}]


@settings(max_examples=30, deadline=None)
@given(lines=st.lists(st.sampled_from(['{"a": 1}', "", "  ", '{"b": "\\u00e4"}']), min_size=1))
def test_blank_lines_are_passed_over_and_counted(tmp_path_factory, lines):
    """Each row is found at the line that an editor shows."""
    path = tmp_path_factory.mktemp("x") / "a.jsonl"
    path.write_text("\n".join(lines))
    wanted = [(json.loads(t), f"{path}:{n}") for n, t in enumerate(lines, 1) if t.strip()]
    if not wanted:
        with pytest.raises(DataError, match="holds no rows"):
            open_rows(path)
        return
    rows = open_rows(path)
    assert [(rows[i], rows.where(i)) for i in range(len(rows))] == wanted


def test_several_files_and_globs_are_joined(tmp_path):
    """A list keeps its order, a glob is sorted, and errors name the file they are about."""
    write_jsonl(tmp_path / "b.jsonl", ROWS[:3])
    write_jsonl(tmp_path / "c.jsonl", ROWS[3:5])
    write_parquet(tmp_path / "a.parquet", ROWS[5:11])
    given = [str(tmp_path / "*.jsonl"), str(tmp_path / "a.parquet")]
    rows = open_rows(given)
    assert [rows[i] for i in range(len(rows))] == ROWS[:11]
    names = [tmp_path / "b.jsonl:3", tmp_path / "c.jsonl:1", tmp_path / "a.parquet:6"]
    assert [rows.where(i) for i in (2, 3, 10)] == [str(n) for n in names]
    assert [p.name for p in find_files(str(tmp_path / "*.*"))] == [
        "a.parquet",
        "b.jsonl",
        "c.jsonl",
    ]


def test_listed_rows():
    rows = ListedRows(ROWS, "row")
    assert (len(rows), rows[3], rows.where(3)) == (25, ROWS[3], "row 3")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("*.parquet", r"\*\.parquet matches no file"),
        ("trian.jsonl", r"no such file: .*trian\.jsonl; did you mean 'train\.jsonl'"),
        ("notes.txt", r"notes\.txt: unknown kind of file; expected one of \.jsonl"),
        (".", r"is a folder; name its files, such as .*/\*\.jsonl"),
        ("empty.jsonl", r"empty\.jsonl holds no rows"),
        (["train.jsonl", "*.jsonl"], r"named twice"),
        ([], "expected at least one"),
    ],
)
def test_bad_names_are_refused(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "train.jsonl")
    (tmp_path / "notes.txt").write_text("a\n")
    if name == "empty.jsonl":
        (tmp_path / name).write_text("\n")
    with pytest.raises(DataError, match=message):
        open_rows(name)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": ', "a.jsonl:2: not JSON"),
        (b"\xff\xfe", "a.jsonl:2: not JSON"),
        (b'{"a": "\\ud83d"}', "a.jsonl:2: not JSON .*surrogate"),
        (b'["a"]', r'a.jsonl:2: expected a JSON object, got \["a"\]'),
    ],
)
def test_broken_lines_are_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": "\\ud83d\\ude00"}\n' + line + b"\n")
    rows = open_rows(path)
    assert rows[0] == {"a": "😀"}
    with pytest.raises(DataError, match=message):
        rows[1]


def test_damaged_parquet_files_are_refused(tmp_path):
    """Cut at its end, with a page destroyed, not Parquet at all, or without rows."""
    path = write_parquet(tmp_path / "a.parquet")
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(DataError, match=r"a\.parquet is not a whole Parquet file"):
        open_rows(path)
    path.write_bytes(whole[:4] + b"\xff" * 60 + whole[64:])
    with pytest.raises(DataError, match=r"a\.parquet is not a whole Parquet file"):
        open_rows(path)[0]
    write_jsonl(path)
    with pytest.raises(DataError, match=r"a\.parquet is not a whole Parquet file"):
        open_rows(path)
    with pytest.raises(DataError, match=r"b\.parquet holds no rows"):
        open_rows(write_parquet(tmp_path / "b.parquet", []))


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install 'tunix\[data\]'"):
        open_rows(path)


def test_a_parquet_file_is_read_a_row_group_at_a_time(tmp_path, monkeypatch):
    """Of 16 MB in 64 groups the cache of 1 MB and what decoding a group needs are in memory."""
    rng = random.Random(0)
    rows = [{"text": rng.randbytes(2000).hex()} for _ in range(4000)]
    path = write_parquet(tmp_path / "a.parquet", rows, group=62)
    size, before = path.stat().st_size, pyarrow.total_allocated_bytes()
    monkeypatch.setattr(parquet, "CACHE_BYTES", 2**20)
    table = open_rows(path)
    most = 0
    for i in range(0, 4000, 30):
        assert table[i] == rows[i]
        most = max(most, pyarrow.total_allocated_bytes() - before)
    assert size > 16e6
    assert most < 5e6


def test_tasks_come_from_parquet_and_several_files(tmp_path):
    """Files of one name in two folders give tasks of different ids."""
    (tmp_path / "x").mkdir()
    write_parquet(tmp_path / "a.parquet", [{"prompt": "1+1", "answer": 2, "level": "easy"}])
    write_parquet(tmp_path / "x" / "a.parquet", [{"prompt": "2+2", "answer": 4, "level": "easy"}])
    one = tasks(tmp_path / "a.parquet")
    assert [(t.id, t.answer, t.info) for t in one] == [("a.parquet:1", 2, {"level": "easy"})]
    both = tasks([str(tmp_path / "**" / "*.parquet")])
    assert [t.answer for t in both] == [2, 4]
    assert len({t.id for t in both}) == 2


@pytest.mark.parametrize(
    ("given", "files"),
    [("arithmetic", False), ("a.jsonl", True), ("x/y", True), ("t*", True), (["a"], True)],
)
def test_files_are_told_from_built_in_tasks(given, files):
    assert names_files(given) == files


def test_a_task_column_for_two_parts_is_refused():
    both = PolicyGradientConfig(
        model="m", tasks="a.jsonl", prompt_field="text", answer_field="text", reward="exact_match"
    )
    with pytest.raises(ConfigError, match="prompt_field, answer_field: 'text'; expected a column"):
        task_source(both, None, None, None)
