import json
import math

import numpy as np
import pytest

from tunix.metrics.sinks import JsonLines, TensorBoard, plain


def test_plain_values():
    row = {"a": np.float32(1.5), "b": math.nan, "c": np.int64(3), "d": np.array([1.0, math.inf])}
    assert plain(row) == {"a": 1.5, "b": None, "c": 3, "d": [1.0, None]}
    assert plain({"x": (1, True, None, "é"), "y": object}) == {
        "x": [1, True, None, "é"],
        "y": str(object),
    }


def test_lines_and_cut_back(tmp_path):
    file = JsonLines(tmp_path / "m.jsonl")
    assert file.last() is None
    file.append({"step": 1, "loss": 0.5})
    size = file.size()
    file.append({"step": 2}, {"step": 3, "text": "é"})
    assert file.last() == {"step": 3, "text": "é"}
    file.cut_back(size)
    file.append({"step": 2})
    rows = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert rows == [{"step": 1, "loss": 0.5}, {"step": 2}]
    with pytest.raises(ValueError, match="were expected"):
        file.cut_back(10**6)
    file.close()
    file.close()


def test_a_line_that_does_not_fit_leaves_no_half(tmp_path, monkeypatch):
    import os

    file = JsonLines(tmp_path / "m.jsonl")
    file.append({"step": 1})
    before = (tmp_path / "m.jsonl").read_bytes()
    write, calls = os.write, []

    def full(fd, data):
        calls.append(data)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(fd, data[:3])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        file.append({"step": 2})
    monkeypatch.undo()
    assert (tmp_path / "m.jsonl").read_bytes() == before


def events_of(folder):
    from tensorboardX.proto.event_pb2 import Event

    events = []
    for path in sorted(folder.glob("events.*")):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = Event()
            event.ParseFromString(data[12 : 12 + length])
            events.append(event)
            data = data[16 + length :]
    return events


def test_tensorboard_events(tmp_path):
    board = TensorBoard(tmp_path, purge_step=4)
    board.append(4, {"reward/a": 0.25, "nan": math.nan})
    board.close()
    events = events_of(tmp_path)
    scalars = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert scalars == [(4, "reward/a", 0.25)]
    assert [e.step for e in events if e.HasField("session_log")] == [4]
    assert all(e.wall_time > 0 for e in events if e.HasField("summary"))
