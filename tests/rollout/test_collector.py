"""Episodes and groups: what was sampled is what is recorded, and misbehaviour stays where it is."""

import asyncio
import threading
import time

import numpy as np
import pytest

from tests.policies import tiny_policy
from tunix.environments.base import Observation, SingleTurn, Step
from tunix.errors import DataError
from tunix.inference.engine import Engine
from tunix.inference.request import SamplingParams
from tunix.profiling.spans import Spans
from tunix.rewards.resolve import WeightedReward
from tunix.rollout.collector import Collector
from tunix.rollout.episode import EpisodeRunner, request_seed, task_prompt
from tunix.types import Task

LIMIT = 6


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


@pytest.fixture(scope="module")
def engine(policy):
    with Engine(policy.config, policy.params, slots=8, max_positions=64) as running:
        yield running


def tasks(number=2):
    return [
        (Task(f"t{i}", messages=[{"role": "user", "content": f"{i}+1="}], answer=str(i + 1)), 0)
        for i in range(number)
    ]


def collector(policy, engine, reward, environment=SingleTurn, size=4, timeout=20.0, **more):
    runner = EpisodeRunner(policy, engine, environment, 32, 48, timeout, Spans())
    sampling = SamplingParams(max_tokens=LIMIT, stop_ids=policy.stop_ids)
    if not isinstance(reward, list):
        reward = [] if reward is None else [WeightedReward("reward", reward)]
    return Collector(runner, reward, sampling, size, seed=3, **more)


def test_an_episode_is_recorded_as_it_was_sampled(policy, engine):
    """Prompt ids, then the sampled ids; mask, log-probs and versions exactly on the latter."""
    (group, other) = collector(policy, engine, lambda task, episode: 1.0).collect(tasks())
    assert (group.task.id, other.task.id) == ("t0", "t1")
    prompt = task_prompt(policy, group.task, 32)
    for played in group.trajectories:
        size = len(prompt)
        assert list(played.tokens[:size]) == prompt
        assert not played.action_mask[:size].any()
        assert played.action_mask[size:].all()
        assert (played.policy_version[size:] == 0).all()
        assert (played.policy_version[:size] == -1).all()
        assert (played.logprobs[size:] < 0).all()
        assert not played.logprobs[:size].any()
        ended = played.tokens[-1] in policy.stop_ids
        assert played.status == ("finished" if ended else "truncated")
        assert played.completion_tokens <= LIMIT
        assert played.messages[-1] == {"role": "assistant", "content": played.text}


def test_samples_of_a_group_differ_and_repeat(policy, engine):
    """Eight samples are eight draws; the same seed gives the same eight, another epoch others."""
    one = collector(policy, engine, None, size=8).collect(tasks(1))[0]
    two = collector(policy, engine, None, size=8).collect(tasks(1))[0]
    other = collector(policy, engine, None, size=8).collect([(tasks(1)[0][0], 1)])[0]
    drawn = [tuple(t.tokens) for t in one.trajectories]
    assert len(set(drawn)) == 8
    assert drawn == [tuple(t.tokens) for t in two.trajectories]
    assert drawn != [tuple(t.tokens) for t in other.trajectories]


def test_request_seeds_name_their_episode():
    names = [
        (s, t, e, i, n)
        for s in (0, 1)
        for t in "ab"
        for e in (0, 1)
        for i in (0, 1)
        for n in (0, 1)
    ]
    seeds = {request_seed(*name) for name in names}
    assert len(seeds) == len(names)
    assert all(0 <= seed < 2**31 for seed in seeds)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (float("nan"), "expected a finite number"),
        (float("inf"), "expected a finite number"),
        ("1.0", "expected a finite number"),
        (None, "expected a finite number"),
        ({"right": 1.0, "short": float("nan")}, "reward part 'short' is nan"),
        (ZeroDivisionError("oh"), "reward: ZeroDivisionError: oh"),
    ],
)
def test_a_useless_reward_removes_only_its_own_sample(policy, engine, given, message):
    def reward(task, episode):
        if episode.sample == 1:
            if isinstance(given, Exception):
                raise given
            return given
        return 1

    group = collector(policy, engine, reward).collect(tasks(1))[0]
    np.testing.assert_array_equal(group.valid, [True, False, True, True])
    np.testing.assert_array_equal(np.isnan(group.rewards), [False, True, False, False])
    assert message in group.trajectories[1].error


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True)])
def test_numbers_of_any_kind_are_rewards(policy, engine, value):
    group = collector(policy, engine, lambda task, episode: value, size=1).collect(tasks(1))[0]
    assert group.rewards == [1.0]


def test_named_parts_are_added_up(policy, engine):
    parts = {"right": 1.0, "short": 0.25}
    group = collector(policy, engine, lambda task, episode: parts, size=1).collect(tasks(1))[0]
    assert group.rewards == [1.25]
    assert group.trajectories[0].reward_parts == parts


def test_the_total_is_weighted_and_the_parts_are_not(policy, engine):
    rewards = [
        WeightedReward("one", lambda task, episode: 1.0, 2.0),
        WeightedReward("two", lambda task, episode: {"a": 3.0, "b": -1}, 0.5),
    ]
    played = collector(policy, engine, rewards, size=1).collect(tasks(1))[0].trajectories[0]
    assert played.reward == 2 * 1.0 + 0.5 * 3.0 - 0.5
    assert played.reward_parts == {"one": 1.0, "a": 3.0, "b": -1.0}


def test_two_parts_of_one_name_are_no_reward(policy, engine):
    rewards = [WeightedReward(n, lambda task, episode: {"a": 1.0}) for n in ("one", "two")]
    played = collector(policy, engine, rewards, size=1).collect(tasks(1))[0].trajectories[0]
    assert (played.reward, played.error) == (None, "two rewards give a part 'a'")


def test_a_missing_part_is_never_zero(policy, engine):
    """One sample of one group lacks what all others of the step have; an empty reward is none."""

    def reward(task, episode):
        if (task.id, episode.sample) == ("t1", 2):
            return {"right": 1.0}
        return {"right": 1.0, "short": -5.0} if episode.sample else {}

    groups = collector(policy, engine, reward).collect(tasks())
    np.testing.assert_array_equal(
        [g.valid for g in groups], [[False, True, True, True], [False, True, False, True]]
    )
    assert "'short' is missing" in groups[1].trajectories[2].error
    assert "expected a part or more" in groups[0].trajectories[0].error


class Paying(SingleTurn):
    """Gives nothing to some episodes, which is a reward of 0 and no missing part."""

    async def step(self, action):
        return Step(reward=float("1" in action["content"]))


def test_what_an_environment_gave_is_a_part(policy, engine):
    group = collector(policy, engine, lambda task, episode: 2.0, Paying, size=8).collect(tasks(1))
    assert group[0].valid.all()
    for played in group[0].trajectories:
        assert played.reward_parts["environment"] == float("1" in played.text)
        assert played.reward == 2 + played.reward_parts["environment"]


class Slow:
    """Counts how many of its calls run at the same time; waits until all eight do."""

    def __init__(self):
        self.now = self.most = 0
        self.all_here = threading.Barrier(8)

    def __call__(self, task, episode):
        self.now += 1
        self.most = max(self.most, self.now)
        self.all_here.wait(timeout=20)
        self.now -= 1
        return 1.0


def test_slow_rewards_run_at_the_same_time(policy, engine):
    """Each of eight calls ends only once all eight run: one after another, none would."""
    slow = Slow()
    group = collector(policy, engine, slow, size=8).collect(tasks(1))[0]
    assert group.valid.all()
    assert slow.most == 8


def test_async_rewards_share_the_loop(policy, engine):
    waiting, threads = [], set()

    async def judged(episode):
        threads.add(threading.get_ident())
        waiting.append(episode.sample)
        while len(waiting) < 4:
            await asyncio.sleep(0.01)
        return 1.0

    async def reward(task, episode):
        return await judged(episode)

    for function in (reward, lambda task, episode: judged(episode)):
        waiting.clear()
        threads.clear()
        assert collector(policy, engine, function).collect(tasks(1))[0].valid.all()
        assert threads == {threading.get_ident()}


def test_an_async_reward_that_hangs_stops_no_other(policy, engine):
    async def reward(task, episode):
        await asyncio.sleep(60 if episode.sample == 0 else 0)
        return 1.0

    async def own(task, episode):
        raise TimeoutError("the judge is busy")

    group = collector(policy, engine, reward, reward_timeout=0.3).collect(tasks(1))[0]
    np.testing.assert_array_equal(group.valid, [False, True, True, True])
    assert group.trajectories[0].error == "reward: none after 0.3 s"
    group = collector(policy, engine, own).collect(tasks(1))[0]
    assert group.trajectories[0].error == "reward: TimeoutError: the judge is busy"


def test_an_async_reward_is_awaited(policy, engine):
    async def reward(task, episode):
        await asyncio.sleep(0.01)
        return 0.5

    assert (
        collector(policy, engine, reward, size=2).collect(tasks(1))[0].rewards.tolist() == [0.5] * 2
    )


def test_each_reward_sees_its_own_task(policy, engine):
    """The answer handed to the reward belongs to the prompt beside it, whatever arrives first."""

    def reward(task, episode):
        time.sleep(0.01 * (episode.sample % 3))
        return float(task.id == episode.task_id and task.messages == episode.messages[:1])

    groups = collector(policy, engine, reward).collect(tasks(6))
    assert all((group.rewards == 1).all() for group in groups)


def test_a_reward_that_hangs_is_given_up(policy, engine):
    def reward(task, episode):
        if episode.sample == 0:
            time.sleep(30)
        return 1.0

    started = time.monotonic()
    group = collector(policy, engine, reward, reward_timeout=0.3).collect(tasks(1))[0]
    assert time.monotonic() - started < 10
    np.testing.assert_array_equal(group.valid, [False, True, True, True])
    assert group.trajectories[0].error == "reward: none after 0.3 s"


class Faulty(SingleTurn):
    """Fails in ``step`` the first ``failures`` times that it is asked, over all episodes."""

    failures = 0
    closed = 0

    async def step(self, action):
        if type(self).failures > 0:
            type(self).failures -= 1
            raise ConnectionError("the sandbox is gone")
        return Step()

    async def close(self):
        type(self).closed += 1


@pytest.mark.parametrize(("failures", "valid"), [(1, 4), (8, 0)])
def test_a_failed_episode_is_replaced_then_left_out(policy, engine, failures, valid):
    """Four episodes with one retry each survive one failure; eight failures exhaust them all."""
    Faulty.failures, Faulty.closed = failures, 0
    group = collector(policy, engine, lambda t, e: 1.0, Faulty, retries=1).collect(tasks(1))[0]
    assert group.valid.sum() == valid
    assert Faulty.closed == 4 + min(failures, 4)
    if not valid:
        assert group.trajectories[0].status == "env_error"
        assert "ConnectionError: the sandbox is gone" in group.trajectories[0].error


def test_a_replacement_is_a_new_sample(policy, engine):
    Faulty.failures = 1
    group = collector(policy, engine, lambda t, e: 1.0, Faulty, retries=1).collect(tasks(1))[0]
    assert sorted(t.sample for t in group.trajectories)[-1] >= 4


def test_an_environment_that_hangs_is_given_up(policy, engine):
    class Hanging(SingleTurn):
        async def step(self, action):
            await asyncio.sleep(60)
            return Step()

    group = collector(policy, engine, None, Hanging, timeout=2.0, retries=0).collect(tasks(1))[0]
    assert {t.status for t in group.trajectories} == {"timeout"}
    assert not group.valid.any()


class Asks:
    """A plain synchronous environment of two turns that answers in text."""

    def reset(self, task):
        return Observation(task.messages)

    def step(self, action):
        self.turns = getattr(self, "turns", 0) + 1
        if self.turns == 2:
            return Step(reward=0.5)
        return Step(Observation(text="42"), reward=0.25, terminated=False)

    def close(self):
        pass


def test_what_the_environment_says_is_never_an_action(policy, engine):
    group = collector(policy, engine, None, Asks, size=8).collect(tasks(1))[0]
    said = policy.tokenizer.encode("42")
    went_on = [t for t in group.trajectories if t.reward == 0.75]
    assert went_on, "no sample ended its first turn by itself"
    for played in went_on:
        starts = [i for i in range(len(played.tokens)) if list(played.tokens[i : i + 2]) == said]
        inserted = [i for i in starts if not played.action_mask[i : i + 2].any()]
        assert any(played.action_mask[:i].any() for i in inserted)


def test_a_prompt_over_the_limit_is_refused(policy, engine):
    long = Task("long", messages=[{"role": "user", "content": "a" * 50}])
    with pytest.raises(DataError, match=r"task 'long': its prompt has \d+ tokens.*\(32\)"):
        collector(policy, engine, None).collect([(long, 0)])
