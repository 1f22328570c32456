import io
import json

import pytest
from rich.console import Console

from tunix.errors import RunError
from tunix.report.summary import before_and_after, show


def sample(step, task, text, reward):
    messages = [{"role": "user", "content": task}, {"role": "assistant", "content": text}]
    return {"step": step, "task": task, "messages": messages, "answer": "7", "reward": reward}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_answers_before_and_after_and_the_curve(tmp_path):
    success = [(0, 0.2), (5, 0.4), (10, 0.7)]
    rows = [
        {
            "step": step,
            "evaluation/success": value,
            "evaluation/success_low": value - 0.1,
            "evaluation/success_high": value + 0.1,
        }
        for step, value in success
    ]
    write(tmp_path / "metrics.jsonl", [*rows, {"step": 10, "loss": None}])
    samples = [
        sample(0, "3+4=", "8", 0.0),
        sample(0, "2+5=", "7", 1.0),
        sample(10, "9+9=", "training", 1.0),
        sample(10, "2+5=", "7", 1.0),
        sample(10, "3+4=", "34|7", 1.0),
    ]
    write(tmp_path / "samples.jsonl", samples)
    out = io.StringIO()
    picture = show(tmp_path, console=Console(file=out))
    assert picture == tmp_path / "curve.png"
    assert picture.stat().st_size > 1000
    shown = out.getvalue()
    assert shown.index("asked   3+4=") < shown.index("asked   2+5=")  # what rose comes first
    assert "before  8   (reward 0.0)" in shown
    assert "after   34|7   (reward 1.0)" in shown
    assert "held-out success by step" in shown
    assert "training" not in shown


def test_supervised_run(tmp_path):
    write(tmp_path / "metrics.jsonl", [{"step": n, "evaluation/loss": 2.0 - n} for n in (0, 1)])
    write(tmp_path / "samples.jsonl", [])
    out = io.StringIO()
    show(tmp_path, console=Console(file=out))
    assert "held-out loss by step" in out.getvalue()
    assert before_and_after(tmp_path) == []


def test_nothing_to_show(tmp_path):
    with pytest.raises(RunError, match=r"metrics.jsonl cannot be read"):
        show(tmp_path)
    write(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 1.0}])
    with pytest.raises(RunError, match="no evaluation to show"):
        show(tmp_path)
