"""A chat over several turns whose token ids stay those that the policy saw and wrote."""

from __future__ import annotations

from collections.abc import Collection

from tunix.text import template
from tunix.text.tokenizer import Tokenizer
from tunix.types import Message


class Conversation:
    """Messages, and the ids of the last prompt and answer.

    Where the chat template extends what came before – its next prompt begins with the last one and
    the answer's text – the ids are extended too, so nothing the policy wrote is encoded again.
    Where it does not (it trims or drops text, or the answer was cut at a stop string), the whole
    chat is rendered and encoded anew.
    """

    def __init__(self, tokenizer: Tokenizer, stop_ids: Collection[int], system: str | None = None):
        """Begin a chat. Raises ``DataError`` where there is no template or refuses ``system``."""
        self.messages: list[Message] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        self._rendered, self._tokens = "", []
        self.ask("a")

    def ask(self, content: str) -> list[int]:
        """Ids of the prompt with one more user message, which is kept by ``answer`` only.

        Raises ``DataError`` where the template refuses the conversation.
        """
        messages = [*self.messages, {"role": "user", "content": content}]
        rendered = template.render(self._tokenizer, messages, add_generation_prompt=True)
        tokens = self._extended(rendered) or self._tokenizer.encode(rendered)
        self._asked = messages, rendered, tokens
        return tokens

    def answer(self, tokens: list[int], text: str) -> None:
        """Keep the last question, with the ids that answered it and their text."""
        messages, rendered, prompt = self._asked
        self.messages = [*messages, {"role": "assistant", "content": text}]
        said = tokens[:-1] if tokens and tokens[-1] in self._stop_ids else tokens
        whole = self._tokenizer.decode(said, skip_special_tokens=True) == text
        self._rendered, self._tokens = rendered + text, [*prompt, *tokens] if whole else []

    def _extended(self, rendered: str) -> list[int] | None:
        """The ids so far with what the template puts behind the answer; None where it cannot be.

        What comes first there is an end-of-turn token, at which the encoding can be cut.
        """
        if not self._tokens or not rendered.startswith(self._rendered):
            return None
        behind = self._tokenizer.encode(rendered[len(self._rendered) :])
        if not behind or behind[0] not in self._stop_ids:
            return None
        last = self._tokens[-1]
        if last in self._stop_ids:  # the policy wrote it itself
            return [*self._tokens, *behind[1:]] if last == behind[0] else None
        return [*self._tokens, *behind]
