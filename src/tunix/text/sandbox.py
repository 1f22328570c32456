"""The sandbox that chat templates run in: jinja2 as ``transformers`` sets it up, within limits.

A template is a stranger's code: it sees plain values, changes none of them, and what it writes and
counts through is limited. Nested loops over the conversation's own texts are not counted.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range

MAX_LOOP_ITEMS = 1_000_000
"""Items that ``range`` hands out in one rendering; a single one is limited to 100 000 by jinja2."""

MAX_CHARACTERS = 2**24
"""Longest text that a template may write."""

MARKED = "tunix_marked"
"""Context variable under which a rendering collects its blocks and its marked texts."""

TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
"""What compiling or rendering a template may raise."""


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}``: the text is rendered, its place recorded."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        context = jinja2.nodes.ContextReference()
        call = self.call_method("_record", [context])
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _record(self, context: jinja2.runtime.Context, caller: Any) -> str:
        text = caller()
        blocks, marked = context[MARKED]
        marked.append((sum(map(len, blocks)), text))
        return text


class _Dict:
    """What ``dict`` means in a template: makes dictionaries, and is no class to climb up from."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict:
        return dict.fromkeys(keys, value)


class LimitedRange:
    """``range`` within one rendering; all its calls together hand out ``MAX_LOOP_ITEMS``."""

    def __init__(self) -> None:
        self.left = MAX_LOOP_ITEMS

    def __call__(self, *bounds: int) -> range:
        """Return Python's ``range(*bounds)``; ``OverflowError`` where the limit is passed."""
        numbers = safe_range(*bounds)
        self.left -= len(numbers)
        if self.left < 0:
            raise OverflowError(f"its loops run over more than {MAX_LOOP_ITEMS} items of range")
        return numbers


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, in which short expressions can't make huge values either."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse to repeat a text or list beyond ``MAX_CHARACTERS``, and huge powers."""
        sizes = [len(v) if isinstance(v, str | list | tuple) else v for v in (left, right)]
        repeated = sizes != [left, right] and sizes[0] * sizes[1] > MAX_CHARACTERS
        if repeated or (operator == "**" and (abs(left) > 2**64 or right > 64)):
            raise OverflowError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


@functools.lru_cache(maxsize=32)
def compile_template(source: str) -> jinja2.Template:
    """Compile a template once; templates are immutable, so the cache is no state."""
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    del environment.globals["lipsum"]  # a loop as long as one asks for
    environment.globals["dict"] = _Dict()
    return environment.from_string(source)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; jinja's own filter escapes HTML characters."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
