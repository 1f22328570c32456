"""Equality of mathematical answers, judged by the library math-verify (extra ``rewards``).

It runs in processes of its own: an answer such as ``9^{9^{9^9}}`` keeps sympy busy for ever, and
a thread that does so can neither be stopped nor lets other threads run.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys

from tunix.rewards import math_worker
from tunix.types import Task, Trajectory

SECONDS = 5
"""Longest comparison, in whole seconds; they take milliseconds as a rule."""

_idle: queue.LifoQueue[subprocess.Popen[str] | None] = queue.LifoQueue()
"""Processes that wait for work, one for two processors; None is one that is not started yet."""
for _ in range(max(1, (os.cpu_count() or 1) // 2)):
    _idle.put(None)


def equal(task: Task, episode: Trajectory) -> float:
    """1 where the last mathematical expression of the text equals ``task.answer``, else 0.

    ``task.answer`` is a number or LaTeX, with or without ``$``.

    Raises:
        RuntimeError: it holds no mathematical expression.
        TimeoutError: no verdict within ``SECONDS``.
    """
    process, line = _idle.get(), ""
    try:
        if process is None:
            process = _start()
        assert process.stdin is not None and process.stdout is not None
        print(json.dumps([str(task.answer), episode.text]), file=process.stdin, flush=True)
        line = process.stdout.readline()
    finally:
        _idle.put(process if line else None)  # one that says nothing has ended
    if not line:
        assert process is not None
        if process.wait() == -signal.SIGALRM:
            raise TimeoutError(f"no verdict within {SECONDS} s")
        raise RuntimeError(f"the process of math-verify ended with code {process.returncode}")
    reply = json.loads(line)
    if "error" in reply:
        raise RuntimeError(reply["error"])
    return float(reply["equal"])


def _start() -> subprocess.Popen[str]:
    # -P: what lies beside the file is not to be imported; a session of its own: no Ctrl-C
    return subprocess.Popen(
        [sys.executable, "-P", math_worker.__file__, str(SECONDS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
