"""Configs: frozen pydantic dataclasses. The line under a field is its meaning and its ``--help``.

Each default is stated once, here or in the algorithm's file. ``steps`` count collect-and-update
rounds, ``updates`` count optimizer updates; lengths are in tokens, times in seconds.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", strict=True, validate_default=True)
"""No unknown field, no silent conversion of a string into a number."""

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunConfig:
    """What every run has: a folder, a seed, checkpoints."""

    run_folder: str | None = None
    """Folder of the run; unset means runs/COMMAND-DATE-TIME."""
    resume: bool = False
    """Go on from the newest complete checkpoint in run_folder."""
    seed: NonNegativeInt = 0
    """Fixes every random choice of the run."""
    checkpoint_interval: PositiveInt = 10
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: PositiveInt = 2
    """How many of the newest checkpoints are kept; the best one by evaluation is kept besides."""
    tensorboard: bool = True
    """Write TensorBoard events beside metrics.jsonl."""
    trackers: list[Literal["wandb", "mlflow"]] = field(default_factory=list)
    """Also send the metrics to these: '["wandb", "mlflow"]'."""
    console: Literal["auto", "live", "plain", "none"] = "auto"
    """What the terminal shows; auto is live in a terminal and plain lines in a pipe."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainingConfig(RunConfig):
    """The model and the optimizer, the same for every algorithm."""

    model: str
    """Hugging Face folder, PEFT adapter folder, .gguf file, or package:NAME that ships one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of computation; what is trained is kept in float32 beside it."""
    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate of AdamW; eta."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer updates over which the learning rate rises linearly to its peak."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up."""
    final_learning_rate: Fraction = 0.0
    """Where a linear or cosine schedule ends, as a fraction of learning_rate."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of AdamW's first moment; beta_1."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of AdamW's second moment; beta_2."""
    adam_epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment; epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, not applied to norms; lambda."""
    max_gradient_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global L2 norm."""
    micro_batch_tokens: PositiveInt = 4096
    """Tokens, padding included, in one pass through the model: memory only, never the result."""
    max_skipped_updates: PositiveInt = 5
    """Stop after so many updates in a row were skipped: their loss or gradient was not finite."""
    lora_rank: NonNegativeInt = 0
    """Train a low-rank adapter of this rank and leave the model alone; 0 trains all of it; r."""
    lora_alpha: PositiveFloat = 16.0
    """Strength of the adapter: its product counts lora_alpha / lora_rank times; alpha."""
    lora_rank_stabilized: bool = False
    """Divide lora_alpha by the root of the rank instead of the rank (rsLoRA)."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the adapter's inputs that are zeroed in training."""
    lora_targets: list[str] = field(default_factory=lambda: ["*_proj"])
    """Patterns of modules that get one: q_proj k_proj v_proj o_proj gate_proj up_proj
    down_proj embed_tokens lm_head."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SamplingConfig:
    """How completions are drawn."""

    temperature: NonNegativeFloat = 1.0
    """Logits are divided by this before the softmax; 0 takes the likeliest token."""
    top_k: PositiveInt | None = None
    """Draw from the k likeliest tokens only; unset means no limit."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the smallest set of tokens that holds this much probability."""
    min_p: Fraction = 0.0
    """Draw from tokens at least this likely relative to the likeliest."""
    max_prompt_tokens: PositiveInt = 512
    """Longest prompt; a longer one is refused."""
    max_completion_tokens: PositiveInt = 128
    """Most tokens of one answer."""
    stop: list[Annotated[str, Field(min_length=1)]] | None = None
    """Texts that end an answer besides the end of turn, as a list: '["###", "\\n\\n"]'."""
    include_stop: bool = False
    """Keep the stop text in the answer's text; its tokens are the same either way."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BatchSamplingConfig(SamplingConfig):
    """How many completions are drawn at once."""

    slots: PositiveInt = 64
    """Sequences that the generation engine works on at once."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class JudgeConfig:
    """How rows become tasks and how answers are judged."""

    prompt_field: str = "prompt"
    """Column that holds the prompt: a text or a list of chat messages."""
    answer_field: str = "answer"
    """Column that holds the right answer, handed to the reward; may be absent."""
    system: str | None = None
    """System message put before each prompt."""
    reward: dict[str, Annotated[float, Field(allow_inf_nan=False)]] | str | None = None
    """A reward's name, or several with their weights: '{"math": 1, "length:200": 0.1}'. exact_match
    last_number math after:MARKER regex:PATTERN format:PATTERN length:TOKENS json_schema:FILE or
    my_module:my_function; unset: the task's own."""
    environment: str | None = None
    """my_module:MyEnvironment; unset means one answer a task, judged by the reward."""
    reward_timeout: PositiveFloat = 30.0
    """Seconds after which a reward counts as missing."""
    episode_timeout: PositiveFloat = 600.0
    """Seconds after which an episode is given up."""
    episode_retries: NonNegativeInt = 1
    """How often a failed episode is replaced by a fresh sample of its task."""
    success_reward: float = 1.0
    """Reward from which an episode counts as a success."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TaskConfig(JudgeConfig):
    """Where tasks come from, in training and in its evaluations."""

    tasks: list[str] | str | None = None
    """Files of tasks (.jsonl, .parquet), globs, or the name of a built-in task."""
    evaluation_tasks: list[str] | str | None = None
    """Files of held-out tasks; unset means the built-in's own, or a split of tasks."""
    evaluation_size: PositiveInt = 256
    """Most held-out tasks in an evaluation."""
    evaluation_temperature: NonNegativeFloat = 1.0
    """Temperature of evaluation; 0 is greedy."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PolicyGradientConfig(TrainingConfig, BatchSamplingConfig, TaskConfig):
    """What every on-policy algorithm for language shares."""

    temperature: PositiveFloat = 1.0
    """Logits are divided by this before the softmax, in sampling and in training alike."""
    steps: PositiveInt = 100
    """Rounds of collecting and updating."""
    tasks_per_step: PositiveInt = 8
    """Tasks in a step."""
    group_size: PositiveInt = 8
    """Episodes a task; G."""
    updates_per_step: PositiveInt = 1
    """Parts into which a step's groups are split, one optimizer update each."""
    epochs_per_step: PositiveInt = 1
    """Passes over a step's groups; mu."""
    evaluation_interval: NonNegativeInt = 10
    """Steps between evaluations; 0 means only before the first and after the last step."""
    truncated: Literal["keep", "mask", "zero"] = "keep"
    """Completions cut at the limit: keep them, mask them out of the loss, or zero their reward (in
    evaluations as well)."""
    max_invalid_share: Fraction = 0.5
    """Stop when in three steps in a row more than this share of samples has no usable reward."""
