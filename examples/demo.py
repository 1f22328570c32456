"""The main job on a laptop: a language model gets better at a task by reinforcement learning.

    python examples/demo.py --seed 0 --folder runs/demo

1. A tokenizer and a Llama of one million parameters are made from scratch.
2. Supervised fine-tuning shows it correct additions in two habits: half of them with the answer at
   once, half with the work written down first. After a minute or two it does both, the first badly.
3. GRPO lets it try each task eight times and rewards right answers. It finds out by itself that
   writing the work down pays, and does that more carefully.

The last line is ``held-out success: A -> B``: the same evaluator, tasks and sampling before and
after, on additions that neither phase has seen.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import tunix
from tunix.cli.main import use_compilation_cache

TASK = "arithmetic"
SFT_STEPS = 400
GRPO_STEPS = 12


def make_model(folder: Path, seed: int) -> None:
    """Write an untrained model and its character tokenizer as an ordinary model folder."""
    import jax

    from tunix.environments.verifiable import ALPHABET
    from tunix.models import llama
    from tunix.models.policy import Policy, save_policy
    from tunix.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.characters(ALPHABET)
    config = llama.LlamaConfig(
        vocab_size=64,
        hidden_size=144,
        intermediate_size=392,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        head_dim=36,
        max_positions=128,
        rope_theta=1000.0,
    )
    params = llama.initialize(jax.random.key(seed), config, embedding_deviation=0.2)
    assert tokenizer.eos_id is not None
    save_policy(Policy(config, params, tokenizer, frozenset({tokenizer.eos_id})), folder)


def main() -> None:
    """Make the model, fine-tune it, improve it by GRPO, and show what changed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    seed = arguments.seed
    use_compilation_cache()
    folder = arguments.folder or Path(f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}-seed{seed}")
    started = time.perf_counter()

    print(f"1/3 an untrained Llama and its tokenizer -> {folder / 'untrained'}", flush=True)
    make_model(folder / "untrained", seed)

    print("2/3 supervised fine-tuning: two ways to answer, both correct", flush=True)
    sft = tunix.sft(
        tunix.SFTConfig(
            model=str(folder / "untrained"),
            data=TASK,
            run_folder=str(folder / "sft"),
            steps=SFT_STEPS,
            batch_size=64,
            learning_rate=2e-3,
            warmup_steps=30,
            schedule="cosine",
            final_learning_rate=0.05,
            weight_decay=0.01,
            evaluation_interval=0,
            checkpoint_interval=200,
            seed=seed,
        )
    )

    print("3/3 GRPO: eight tries a task, a right answer is worth 1, a wrong one 0", flush=True)
    run = tunix.grpo(
        tunix.GRPOConfig(
            model=str(sft.folder / "model"),
            tasks=TASK,
            run_folder=str(folder / "grpo"),
            steps=GRPO_STEPS,
            tasks_per_step=32,
            group_size=8,
            slots=256,
            max_prompt_tokens=16,
            max_completion_tokens=32,
            learning_rate=2e-4,
            micro_batch_tokens=8192,
            warmup_steps=5,
            clip_high=0.28,
            evaluation_interval=2,
            evaluation_size=256,
            seed=seed,
        )
    )
    tunix.show(run, folder)
    first, last = run.evaluations[0]["success"], run.evaluations[-1]["success"]
    print(f"everything is in {folder} ({time.perf_counter() - started:.0f} s)")
    print(f"held-out success: {first:.3f} -> {last:.3f}")


if __name__ == "__main__":
    main()
