"""Run the demo for several seeds and append what it reached to RESULTS.md; resumable.

    python benchmarks/demo_seeds.py 0 1 2 3 4

A seed that RESULTS.md already has at this commit is passed over.
"""

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
LAST = re.compile(r"held-out success: ([\d.]+) -> ([\d.]+)")


def main():
    commit = subprocess.check_output(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True
    ).strip()
    for seed in sys.argv[1:]:
        name = f"| {commit} | demo, seed {seed} |"
        if RESULTS.exists() and name in RESULTS.read_text():
            continue
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "examples/demo.py", "--seed", seed, "--folder", folder]
            printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        found = LAST.search(printed.stdout.splitlines()[-1])
        row = f"{name} {found[1]} | {found[2]} | {time.perf_counter() - started:.0f} s |"
        print(row, flush=True)
        with RESULTS.open("a") as sink:
            sink.write(row + "\n")


if __name__ == "__main__":
    main()
