"""What on-policy algorithms for language share: tasks, engine, collector, evaluator, packing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from tunix.config import PolicyGradientConfig
from tunix.datasets import tasks as task_files
from tunix.datasets.batch import Batch, pack, row_length
from tunix.datasets.batch import Sequence as PackedSequence
from tunix.datasets.order import ShuffledOrder
from tunix.environments.base import Environment, SingleTurn
from tunix.environments.verifiable import built_in
from tunix.errors import ConfigError, RunError
from tunix.inference.engine import Engine
from tunix.inference.request import check_context, sampling_params
from tunix.losses.aggregate import Aggregate, token_weights
from tunix.models.policy import Policy
from tunix.rewards.resolve import WeightedReward, import_object, resolve_rewards
from tunix.rewards.verifiable import Reward
from tunix.rollout.collector import Collector
from tunix.rollout.episode import EpisodeRunner, task_prompt
from tunix.training.evaluation import Evaluator, part_means, sample_record
from tunix.training.learner import LossFunction
from tunix.training.loop import Observer, TrainingRun
from tunix.training.run_folder import RunFolder
from tunix.types import Group, Task

BUILT_IN_SIZE = 20_000
"""Training tasks drawn from a built-in family; all distinct where the family has so many."""

CHECKED_PROMPTS = 2_000
"""Training prompts rendered before the first step, to refuse bad ones early; seconds at most."""


@dataclass(frozen=True)
class TaskSource:
    """Training and held-out tasks, and who judges them."""

    training: list[Task]
    held_out: list[Task]
    rewards: Sequence[WeightedReward]
    """None of them: the environment judges."""
    make_environment: Callable[[], Environment]


def task_source(
    config: PolicyGradientConfig,
    tasks: Sequence[Task] | None,
    reward: Reward | None,
    environment: Callable[[], Environment] | None,
) -> TaskSource:
    """Find tasks, reward and environment: objects where given, else what the config names.

    Raises:
        ConfigError, DataError: nothing names the tasks or who judges them, or it cannot be read.
    """
    training, held_out, own_reward = _tasks(config, tasks)
    if environment is None and config.environment is not None:
        environment = import_object(config.environment, "environment")
    if reward is None and environment is None and config.reward is None:
        reward = own_reward
    if reward is not None:
        rewards = [WeightedReward("reward", reward)]
    elif config.reward is not None:
        rewards = resolve_rewards(config.reward)
    elif environment is not None:
        rewards = []
    else:
        raise ConfigError(
            "reward: nothing judges the answers; set reward (exact_match, last_number, "
            "regex:PATTERN, my_module:my_function) or environment"
        )
    return TaskSource(training, held_out, rewards, environment or SingleTurn)


def _tasks(
    config: PolicyGradientConfig, tasks: Sequence[Task] | None
) -> tuple[list[Task], list[Task], Reward | None]:
    own_reward = None
    if tasks is not None:
        training = [t for t in tasks if t.split == "train"]
        held_out = [t for t in tasks if t.split != "train"]
        task_files.check_ids([*tasks])
    elif config.tasks is None:
        raise ConfigError("tasks: not set; expected files or the name of a built-in task")
    elif isinstance(config.tasks, str) and not task_files.names_files(config.tasks):
        family = built_in(config.tasks)
        own_reward = family.reward
        training = family.tasks(BUILT_IN_SIZE, config.seed)
        held_out = family.tasks(config.evaluation_size, 0, "held_out")
    else:
        training, held_out = _read(config, config.tasks), []
    if config.evaluation_tasks is not None:
        held_out = _read(config, config.evaluation_tasks)
    if not held_out:
        training, held_out = task_files.hold_out(training, config.evaluation_size)
    return training, held_out[: config.evaluation_size], own_reward


def _read(config: PolicyGradientConfig, files: list[str] | str) -> list[Task]:
    if config.prompt_field == config.answer_field:
        raise ConfigError(
            f"prompt_field, answer_field: {config.prompt_field!r}; expected a column of its own "
            "for each"
        )
    return task_files.tasks(
        files, prompt=config.prompt_field, answer=config.answer_field, system=config.system
    )


@dataclass(kw_only=True)
class OnPolicyRun(TrainingRun[PolicyGradientConfig]):
    """A training run whose batches are collected by the policy itself."""

    source: TaskSource
    minimum_group: int
    """Samples that the statistics of a group need."""
    reference: Any = None
    """Parameters of the reference policy, None where the algorithm has none."""

    order: ShuffledOrder = field(init=False)
    engine: Engine = field(init=False)
    collector: Collector = field(init=False)

    @classmethod
    def open(
        cls,
        folder: RunFolder,
        config: PolicyGradientConfig,
        source: TaskSource,
        policy: Policy,
        loss: LossFunction,
        observers: Sequence[Observer],
        *,
        minimum_group: int,
        needs_reference: bool,
    ) -> OnPolicyRun:
        """Set up a run; ``minimum_group`` is the number of samples group statistics need.

        The reference is the policy as it is given, without its adapter.

        Raises:
            ConfigError: sizes that do not fit each other or the model's context.
            DataError: a prompt that cannot be used, among the first thousands.
        """
        _check_sizes(config, policy, minimum_group)
        policy = replace(policy, now=folder.begun)
        for task in [*source.held_out, *source.training[:CHECKED_PROMPTS]]:
            task_prompt(policy, task, config.max_prompt_tokens)
        return cls(
            folder=folder,
            config=config,
            policy=policy,
            loss=loss,
            total_steps=config.steps,
            total_updates=config.steps * config.updates_per_step * config.epochs_per_step,
            temperature=config.temperature,
            score="success",
            sign=1,
            observers=observers,
            evaluation_interval=config.evaluation_interval,
            source=source,
            minimum_group=minimum_group,
            reference=policy.params if needs_reference else None,
        )

    def _open(self, stack: contextlib.ExitStack) -> None:
        config, source = self.config, self.source
        self.order = ShuffledOrder(len(source.training), config.seed)
        longest = config.max_prompt_tokens + config.max_completion_tokens
        params, adapter = self.learner.policy
        self.engine = Engine(
            self.policy.config,
            params,
            adapters=() if adapter is None else (adapter,),
            slots=config.slots,
            max_positions=longest,
            version=self.step,
            tokenizer=self.policy.tokenizer,
        )
        stack.callback(self.engine.close)
        runner = EpisodeRunner(
            self.policy,
            self.engine,
            source.make_environment,
            config.max_prompt_tokens,
            longest,
            config.episode_timeout,
            self.spans,
        )
        sampling = sampling_params(config, self.policy.stop_ids)
        self.collector = Collector(
            runner,
            source.rewards,
            sampling,
            config.group_size,
            config.seed,
            config.episode_retries,
            config.reward_timeout,
            config.truncated == "zero",
        )
        held_out = replace(sampling, temperature=config.evaluation_temperature)
        judge = replace(self.collector, sampling=held_out, size=1)
        evaluator = Evaluator(judge, source.held_out, config.success_reward)
        self.evaluate = evaluator.evaluate if source.held_out else None

    def collect(self, step: int) -> list[Group]:
        """Play the groups of a step with the policy as it stands.

        Raises:
            RunError: in three steps in a row too many samples had no usable reward.
        """
        size = self.config.tasks_per_step
        wanted = []
        for position in range(step * size, (step + 1) * size):
            index, epoch = self.order[position]
            wanted.append((self.source.training[index], epoch))
        with self.spans("rollout"), self.interruptible():
            groups = self.collector.collect(wanted)
        self._check_invalid(groups)
        return groups

    def pack(
        self,
        groups: Sequence[Group],
        advantages: Float[np.ndarray, "groups size"],
        trained: Bool[np.ndarray, "groups size"],
        aggregate: Aggregate,
    ) -> Batch | None:
        """Pack the episodes marked in ``trained`` for one update; None where there are none."""
        with self.spans("pack"):
            chosen = [
                (trajectory, float(advantages[g, i]))
                for g, group in enumerate(groups)
                for i, trajectory in enumerate(group.trajectories)
                if trained[g, i]
            ]
            if not chosen:
                return None
            counts = np.array([t.completion_tokens for t, _ in chosen])
            weights = token_weights(counts, aggregate, float(self.config.max_completion_tokens))
            sequences = [
                PackedSequence(
                    t.tokens,
                    t.action_mask,
                    np.full(len(t.tokens), weight),
                    {
                        "behaviour_logprobs": t.logprobs.astype(np.float64),
                        "advantages": np.full(len(t.tokens), advantage),
                    },
                )
                for (t, advantage), weight in zip(chosen, weights, strict=True)
            ]
            longest = max(len(s.tokens) for s in sequences)
            batch = pack(sequences, row_length(longest, self.config.micro_batch_tokens))
        if self.reference is None:
            return batch
        with self.spans("reference"):
            scored = self.learner.logprobs(batch, self.reference)
        return replace(batch, reference_logprobs=scored)

    def finish(self, groups: Sequence[Group]) -> None:
        """Publish the new policy to the engine and end the step."""
        with self.spans("publish"):
            changed = self._publish(self.step + 1)
        moved = [u for u in self._updates if u["gradient_norm"] > 0 and not u["skipped_updates"]]
        if moved and not changed:
            raise RunError(
                f"step {self.step + 1}: an update with a gradient of norm "
                f"{moved[0]['gradient_norm']:.3g} left every published number as it was; is "
                f"learning_rate = {self.config.learning_rate} lost in {self.config.dtype}?"
            )
        played = [(g.task, t) for g in groups for t in g.trajectories]
        shown = [{"step": self.step + 1} | sample_record(*pair) for pair in played[:4]]
        self.folder.append_samples(shown)
        tokens = sum(len(t.tokens) for _, t in played)
        self.finish_step(rollout_metrics(groups, self.config.success_reward), tokens)

    def _publish(self, version: int) -> bool:
        """Hand the engine what is trained; return whether any number differs from what it had."""
        params, adapter = self.learner.policy
        return self.engine.publish(params if adapter is None else adapter, version)

    def trainable(self, groups: Sequence[Group]) -> Bool[np.ndarray, "groups size"]:
        """Return which samples may enter the loss.

        Those with a usable reward, in a group with at least ``minimum_group`` of them, and, where
        ``truncated`` is ``mask``, not cut at a limit.
        """
        valid = np.stack([group.valid for group in groups])
        enough = valid.sum(axis=1, keepdims=True) >= self.minimum_group
        if self.config.truncated == "mask":
            ended = [[t.status != "truncated" for t in g.trajectories] for g in groups]
            return valid & enough & np.array(ended)
        return valid & enough

    def _check_invalid(self, groups: Sequence[Group]) -> None:
        played = [t for group in groups for t in group.trajectories]
        invalid = [t for t in played if t.reward is None]
        streak = self.counters.get("invalid_in_a_row", 0) + 1
        too_many = len(invalid) > self.config.max_invalid_share * len(played)
        self.counters["invalid_in_a_row"] = streak if too_many else 0
        if invalid:
            self.tell(
                f"step {self.step + 1}: {len(invalid)} of {len(played)} samples have no usable "
                f"reward and leave the loss; the first says: {invalid[0].error}"
            )
        if too_many and streak >= 3:
            raise RunError(
                f"in 3 steps in a row more than {self.config.max_invalid_share:.0%} of the "
                f"samples had no usable reward ({invalid[0].error}); stopped"
            )


def rollout_metrics(groups: Sequence[Group], success_reward: float) -> dict[str, float]:
    """Means over the samples with a usable reward; counts over all of a step's samples."""
    played = [t for group in groups for t in group.trajectories]
    judged = [t for t in played if t.reward is not None]
    rewards = np.array([t.reward for t in judged], np.float64)
    lengths = np.array([t.completion_tokens for t in judged], np.float64)
    equal = [g for g in groups if g.valid.any() and np.ptp(g.rewards[g.valid]) == 0]
    return {
        "reward_mean": float(rewards.mean()) if judged else float("nan"),
        "reward_std": float(rewards.std()) if judged else float("nan"),
        "success": float((rewards >= success_reward).mean()) if judged else float("nan"),
        "completion_tokens_mean": float(lengths.mean()) if judged else float("nan"),
        "completion_tokens": float(sum(t.completion_tokens for t in played)),
        "truncated_samples": float(sum(t.status == "truncated" for t in played)),
        "invalid_samples": float(len(played) - len(judged)),
        "equal_reward_groups": float(len(equal)),
    } | part_means(judged)


def _check_sizes(config: PolicyGradientConfig, policy: Policy, minimum_group: int) -> None:
    if config.group_size < minimum_group:
        raise ConfigError(
            f"group_size: {config.group_size}; this algorithm compares the samples of a group and "
            f"needs at least {minimum_group}"
        )
    if config.updates_per_step > config.tasks_per_step:
        raise ConfigError(
            f"updates_per_step: {config.updates_per_step} parts of {config.tasks_per_step} groups "
            "(tasks_per_step); expected at most one part a group"
        )
    check_context(config, policy.config.max_positions)
