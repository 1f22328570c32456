"""A request generated alone, in a fresh scheduler, under the weights its tokens were drawn with."""

from __future__ import annotations

import numpy as np

from tunix.inference import Completion, Request
from tunix.inference.scheduler import Scheduler


def run(scheduler: Scheduler, requests: list[Request]) -> list[Completion]:
    """Generate all requests, submitted together, and return their completions in order."""
    results: dict[int, Completion | Exception] = {}
    for i, request in enumerate(requests):
        scheduler.submit(request, lambda result, i=i: results.__setitem__(i, result))
    while scheduler.has_work:
        scheduler.step()
    return [results[i] for i in range(len(requests))]


def alone(config, weights, request: Request, recorded: Completion, **sizes) -> Completion:
    """Generate ``request`` alone, switching to the version recorded at each token."""
    version = recorded.prefill_version
    scheduler = Scheduler(config, weights[version], version=version, **sizes)
    results: list[Completion | Exception] = []
    scheduler.submit(request, results.append)
    for wanted in recorded.versions:
        if wanted != scheduler.version:
            scheduler.publish(weights[wanted], int(wanted))
        drawn = scheduler.stats.generated_tokens
        while scheduler.stats.generated_tokens == drawn:
            scheduler.step()
    return results[0]


def assert_same(one: Completion, other: Completion) -> None:
    """All fields are equal, floats bit for bit."""
    for name in ("tokens", "logprobs", "log_kept", "versions"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    assert one.prefill_version == other.prefill_version
    assert one.finish_reason == other.finish_reason
