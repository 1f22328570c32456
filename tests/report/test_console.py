import io
import json
import math

import pytest
from rich.console import Console

from tunix.report.console import LiveConsole, RunConsole, console_observer
from tunix.report.layout import TimeLeft, duration, evaluation_text, shares, shown_metrics

GRPO = {
    "step": 3,
    "reward_mean": 0.25,
    "reward_std": 0.43,
    "success": 0.25,
    "loss": 0.01,
    "kl": 0.0012,
    "entropy": 0.9,
    "clip_fraction": 0.031,
    "completion_tokens_mean": 21.5,
    "tokens_per_second": 1234.5,
    "gradient_norm": 0.7,
    "equal_reward_groups": 0.0,
    "invalid_samples": 2.0,
    "skipped_updates": 0.0,
    "seconds": 2.0,
    "time/rollout": 1.2,
}
TIMES = {"rollout": 1.2, "update": 0.6, "engine/decode": 1.1}
HELD_OUT = {
    "success": 0.3,
    "success_low": 0.25,
    "success_high": 0.35,
    "tasks": 256.0,
    "completion_tokens_mean": 20.0,
}


def play(observer, folder, metrics=GRPO, held_out=HELD_OUT):
    observer.start(folder, 10, 0)
    observer.evaluation(0, held_out)
    for step in range(1, 4):
        observer.step(metrics | {"step": step}, TIMES)
    observer.message("careful [not markup]")
    observer.close()
    observer.close()


@pytest.fixture
def folder(tmp_path):
    messages = [{"role": "user", "content": "[3+4]="}, {"role": "assistant", "content": "7|7"}]
    row = {"step": 1, "messages": messages, "answer": "7", "reward": 1.0}
    (tmp_path / "samples.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


def test_plain_lines(folder):
    out = io.StringIO()
    observer = console_observer("auto", Console(file=out, highlight=False))
    assert type(observer) is RunConsole
    play(observer, folder)
    lines = out.getvalue().splitlines()
    assert len(lines) == 6
    assert lines[1] == (
        "step 0/10  held-out success 0.300 (95%: 0.250 to 0.350, 256 tasks)  length 20.0"
    )
    assert lines[2].startswith("step 1/10  reward 0.250 ± 0.430  success 0.250  ")
    assert "KL 0.00120  entropy 0.900  clipped 3.1%" in lines[2]
    assert "invalid samples 2" in lines[2]
    assert "equal groups" not in lines[2]
    assert "2.00 s (rollout 60% update 30% other 10%)  left " in lines[2]
    assert lines[5] == "careful [not markup]"
    assert "\x1b" not in out.getvalue()


def test_live_view(folder):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, height=40, highlight=False)
    observer = console_observer("auto", console)
    assert type(observer) is LiveConsole
    play(observer, folder)
    with console.capture() as last:
        console.print(observer._view())
    view = last.get()
    expected = ["step 3/10", "0.300 (95%: 0.250 to 0.350", "0.250 ± 0.430", "1,234", "rollout 60%"]
    expected += ["[3+4]=", "7|7", "reward 1", "training curve"]
    for text in expected:
        assert text in view, text
    assert "careful [not markup]" in out.getvalue()


def test_no_console_prints_nothing(folder, capsys):
    play(console_observer("none"), folder)
    assert capsys.readouterr() == ("", "")


def test_supervised_metrics(folder):
    out = io.StringIO()
    metrics = {"step": 1, "loss": 2.0, "tokens": 900.0, "tokens_per_second": 500.0, "seconds": 1.0}
    held_out = {"loss": 1.5, "perplexity": 4.48}
    play(RunConsole(Console(file=out)), folder, metrics, held_out)
    lines = out.getvalue().splitlines()
    assert lines[1] == "step 0/10  held-out loss 1.5000  perplexity 4.48"
    assert "loss 2.0000  tokens/s 500" in lines[2]


def test_numbers_that_are_not():
    assert ("reward", "-") in shown_metrics({"reward_mean": math.nan})
    assert "nan" in evaluation_text({"success": math.nan})


def test_shares_add_up():
    parts = shares(TIMES, 2.0)
    assert [name for name, _ in parts] == ["rollout", "update", "other"]
    assert sum(part for _, part in parts) == pytest.approx(1.0)
    assert shares({}, 0.0) == [("other", 1.0)]


def test_time_left_forgets_the_first_step():
    now = [0.0]
    left = TimeLeft(lambda: now[0], 10, 0)
    now[0] = 100.0  # compiles
    assert left.step(1) == pytest.approx(900.0)
    for step in range(2, 6):
        now[0] += 2.0
        seconds = left.step(step)
    assert seconds == pytest.approx(10.0)
    assert duration(seconds) == "0:10"
    assert duration(3723.4) == "1:02:03"
