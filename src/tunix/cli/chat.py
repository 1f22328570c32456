"""``tunix chat``: talk to a model, its answers shown as they are written."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from typing import Literal

from pydantic.dataclasses import dataclass
from rich.console import Console

from tunix.cli.generate import SMALLEST_BATCH, open_engine
from tunix.config import STRICT, NonNegativeInt, PositiveInt, SamplingConfig
from tunix.errors import DataError, ModelError, nearest
from tunix.inference.engine import Engine
from tunix.inference.request import FinishReason, Request, derived_seed, sampling_params
from tunix.models.policy import Policy, answer_text, load_policy
from tunix.text.conversation import Conversation
from tunix.text.stop import AnswerStream

COMMANDS = {"/exit": "leave", "/reset": "forget the conversation"}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ChatConfig(SamplingConfig):
    """Talk to a model."""

    model: str
    """Hugging Face folder, PEFT adapter folder, .gguf file, or package:NAME that ships one."""
    system: str | None = None
    """System message at the beginning."""
    max_prompt_tokens: PositiveInt = 2048
    """Longest conversation that is answered; at most the model's context."""
    max_completion_tokens: PositiveInt = 512
    """Most tokens of one answer."""
    seed: NonNegativeInt = 0
    """Fixes the answers to the same lines."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of parameters and computation."""


def run(config: ChatConfig) -> None:
    """Answer the lines of standard input until it ends or says /exit.

    In a terminal it asks for them; in a pipe standard output has nothing but the answers.

    Raises:
        ModelError, DataError: the model has no tokenizer or chat template, or the template refuses
            the system message.
    """
    policy = load_policy(config.model, config.dtype)
    if policy.tokenizer is None:
        raise ModelError(f"model: {config.model} has no tokenizer; a chat needs one")
    longest = config.max_prompt_tokens + config.max_completion_tokens
    longest = min(longest, policy.config.max_positions)
    with open_engine(policy, SMALLEST_BATCH, 1, longest) as engine:
        chat = Chat(config, policy, engine, longest)
        for line in lines():
            if line == "/exit":
                return
            chat.say(line)


def lines() -> Iterator[str]:
    """Yield what a person types, or the lines of a pipe, without blank ones."""
    if not sys.stdin.isatty():
        yield from filter(None, (line.strip() for line in sys.stdin))
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # arrow keys and history for input()
    print(", ".join(f"{name} to {what}" for name, what in COMMANDS.items()), file=sys.stderr)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            line = input("> ").strip()
            if line:
                yield line


class Chat:
    """A conversation with a policy, shown on a console; lengths in tokens."""

    def __init__(self, config: ChatConfig, policy: Policy, engine: Engine, longest: int):
        self._config, self._policy, self._engine, self._longest = config, policy, engine, longest
        self._sampling = sampling_params(config, policy.stop_ids)
        self._screen, self._notices = Console(), Console(stderr=True, style="dim")
        self._turn = 0
        self._begin()

    def say(self, line: str) -> None:
        """Answer a line, or obey it if it is one of ``COMMANDS``."""
        if line.startswith("/") and len(line.split()) == 1:
            if line == "/reset":
                self._begin()
            elif line not in COMMANDS:
                known = ", ".join(COMMANDS)
                self._note(f"unknown command {line!r}{nearest(line, COMMANDS)} (known: {known})")
            return
        try:
            prompt = self._conversation.ask(line)
        except DataError as error:
            self._note(str(error))
            return
        most = min(self._config.max_prompt_tokens, self._longest - 1)
        if len(prompt) > most:
            self._note(
                f"the conversation would have {len(prompt)} tokens; at most {most} fit "
                "(max_prompt_tokens and the model's context). Say less, or /reset"
            )
            return
        self._answer(prompt)

    def _begin(self) -> None:
        assert self._policy.tokenizer is not None
        policy, system = self._policy, self._config.system
        self._conversation = Conversation(self._policy.tokenizer, policy.stop_ids, system)

    def _answer(self, prompt: list[int]) -> None:
        """Show the answer; one that Ctrl-C ends is kept as far as it was written."""
        seed = derived_seed(self._config.seed, self._turn)
        request = Request(prompt, self._sampling, seed, adapter=self._engine.adapters)
        self._turn += 1
        drawn: list[int] = []
        reason: FinishReason = "aborted"
        with contextlib.suppress(KeyboardInterrupt):
            reason = asyncio.run(self._show(request, drawn))
        self._screen.out()
        if reason != "stop":
            why = (
                "interrupted" if reason == "aborted" else "cut at max_completion_tokens or context"
            )
            self._note(f"({why})")
        how = self._sampling
        text = answer_text(self._policy, drawn, how.stop, how.include_stop)
        self._conversation.answer(drawn, text)

    async def _show(self, request: Request, drawn: list[int]) -> FinishReason:
        assert self._policy.tokenizer is not None
        how = self._sampling
        text = AnswerStream(
            self._policy.tokenizer, self._policy.stop_ids, how.stop, how.include_stop
        )
        reason: FinishReason = "aborted"
        try:
            async for piece in self._engine.stream(request):
                for token in piece.tokens:
                    drawn.append(token)
                    self._write(text.push(token))
                    await asyncio.sleep(0)  # Ctrl-C acts here even where the engine is far ahead
                if piece.completion is not None:
                    reason = piece.completion.finish_reason
        finally:
            self._write(text.flush())
        return reason

    def _write(self, text: str) -> None:
        if self._screen.is_terminal:
            text = text.replace("\x1b", "\u241b")  # a model gives no orders to the terminal
        if text:
            self._screen.out(text, end="", highlight=False)
            self._screen.file.flush()

    def _note(self, text: str) -> None:
        self._notices.print(text, markup=False, highlight=False, soft_wrap=True)
