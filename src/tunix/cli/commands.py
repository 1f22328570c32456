"""The one table of commands. Nothing in it is imported before its command is run."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Command:
    """A command: where its config class and its function are, and what it does."""

    config: str
    """``module:Class`` of the config dataclass."""
    function: str
    """``module:function`` that takes the config."""
    summary: str

    def config_class(self) -> type:
        """Import the config class."""
        return _import(self.config)

    def load(self) -> Callable[[Any], Any]:
        """Import the function."""
        return _import(self.function)


LANGUAGE = "tunix.algorithms.language"

COMMANDS: Mapping[str, Command] = {
    "sft": Command(f"{LANGUAGE}.sft:SFTConfig", "tunix.api:sft", "fine-tune a model on examples"),
    "grpo": Command(
        f"{LANGUAGE}.grpo:GRPOConfig", "tunix.api:grpo", "improve a model by trial and reward"
    ),
    "generate": Command(
        "tunix.cli.generate:GenerateConfig", "tunix.cli.generate:run", "let a model answer prompts"
    ),
    "chat": Command("tunix.cli.chat:ChatConfig", "tunix.cli.chat:run", "talk to a model"),
    "eval": Command(
        "tunix.cli.evaluate:EvaluateConfig", "tunix.cli.evaluate:run", "measure a model on tasks"
    ),
    "convert": Command(
        "tunix.cli.convert:ConvertConfig", "tunix.cli.convert:run", "write a model in another form"
    ),
}


def fields_by_command() -> dict[str, list[str]]:
    """Field names of every command's config; imports all of them, so only where one is missed."""
    from tunix.config_parsing import field_names

    return {name: field_names(command.config_class()) for name, command in COMMANDS.items()}


def _import(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
