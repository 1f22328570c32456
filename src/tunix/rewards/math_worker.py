"""Judges mathematical answers, a JSON line each, in a process of its own; imports nothing of tunix.

``[answer, text]`` comes in, ``{"equal": true}`` or ``{"error": ...}`` goes out. A comparison that
takes longer than SECONDS, the first argument, ends the process: a signal that Python does not
handle is the one thing that stops a power tower, whose computation holds the interpreter.
"""

import json
import logging
import resource
import signal
import sys
from typing import Any

MARKS = ("$", "\\boxed", "\\(", "\\[")
"""What tells math-verify where mathematics begins."""

MEMORY = 4 * 2**30
"""Bytes of address space."""


def equal(answer: str, text: str) -> bool:
    """Whether the last mathematical expression in ``text`` equals ``answer``, as math-verify sees.

    Raises:
        ValueError: ``answer`` is no mathematics.
    """
    from math_verify import parse, verify

    marked = answer if any(mark in answer for mark in MARKS) else f"${answer}$"
    expected: Any = parse(marked, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    if not expected:
        raise ValueError(f"task.answer {answer!r} holds no mathematical expression")
    found: Any = parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return verify(expected, found, timeout_seconds=None)


def main(seconds: int) -> None:
    """Answer the lines of standard input until it ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns of missing time limits
    equal("1", "$1$")  # the imports take longer than a comparison may
    for line in sys.stdin:
        signal.alarm(seconds)
        try:
            reply: dict[str, Any] = {"equal": equal(*json.loads(line))}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        signal.alarm(0)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
