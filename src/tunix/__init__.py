"""tunix: JAX-native post-training of language models and control policies."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunix.algorithms.language.grpo import GRPOConfig
    from tunix.algorithms.language.sft import SFTConfig
    from tunix.api import grpo, load_policy, sft
    from tunix.models.policy import save_policy
    from tunix.report.summary import show
    from tunix.types import Task

__version__ = "0.1.0"

__all__ = [
    "GRPOConfig",
    "SFTConfig",
    "Task",
    "__version__",
    "grpo",
    "load_policy",
    "save_policy",
    "sft",
    "show",
]

_WHERE = {
    "GRPOConfig": "tunix.algorithms.language.grpo",
    "SFTConfig": "tunix.algorithms.language.sft",
    "Task": "tunix.types",
    "grpo": "tunix.api",
    "load_policy": "tunix.api",
    "save_policy": "tunix.models.policy",
    "sft": "tunix.api",
    "show": "tunix.report.summary",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: ``import tunix`` alone loads no jax."""
    if name not in _WHERE:
        raise AttributeError(f"module 'tunix' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
