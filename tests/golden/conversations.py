"""Thirty conversations and three chat templates, on which rendered ids were recorded."""


def _chat(*turns: tuple[str, str]) -> list[dict]:
    return [{"role": role, "content": content} for role, content in turns]


LLAMA3_STYLE = (
    "{{- bos_token }}\n{%- for message in messages %}\n"
    "    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}\n"
    "        {{- raise_exception('role ' + message.role) }}\n    {%- endif %}\n"
    "    {%- if message.tool_calls is defined %}\n"
    "        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n"
    "        {{- message.tool_calls[0].function | tojson }}\n        {{- eos_token }}\n"
    "        {%- continue %}\n    {%- endif %}\n"
    "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}\n"
    "    {{- message['content'] | trim }}{{- eos_token }}\n{%- endfor %}\n"
    "{%- if tools is not none %}\n    {{- tools | tojson(indent=2) }}\n{%- endif %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n{%- endif %}\n"
)
"""Trimmed contents, a ``continue``, tool calls as JSON; the end of turn is EOS."""

WITH_MARKERS = (
    "{%- for message in messages %}\n"
    "    {%- if message['role'] == 'assistant' %}\n"
    "        {{- '<|im_start|>assistant\\n' }}\n"
    "        {%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}\n"
    "        {{- '\\n' }}\n    {%- else %}\n"
    "        {{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}\n"
    "        {{- '<|im_end|>\\n' }}\n    {%- endif %}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""ChatML whose assistant text stands between generation markers."""

TEMPLATES = {"own": None, "llama3_style": LLAMA3_STYLE, "with_markers": WITH_MARKERS}
"""``own`` is the template that the model comes with."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "wetter",
            "description": "Weather of a city, <now> & later: “grüß”",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]

_TOOL_CALL = {"type": "function", "function": {"name": "wetter", "arguments": {"city": "Köln"}}}

CONVERSATIONS = [
    _chat(("user", "Hello")),
    _chat(("user", "")),
    _chat(("user", " leading and trailing ")),
    _chat(("user", "\n\nlines\n\n")),
    _chat(("system", "You are terse."), ("user", "1+1=?")),
    _chat(("system", ""), ("user", "Hi")),
    _chat(("user", "2024 is 3.14159 and 1,000,000")),
    _chat(("user", "naïve café – “quotes” … ½ €")),
    _chat(("user", "日本語とMixed 中文 한국어")),
    _chat(("user", "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 end")),
    _chat(("user", "עברית العربية हिन्दी")),
    _chat(("user", "def f(x):\n\treturn  x**2  # tabs\tand  spaces\n")),
    _chat(("user", "<b>html & 'quotes' \"double\"</b>")),
    _chat(("user", "{{ not a template }} {% raw %}")),
    _chat(("user", "special <|im_end|> inside <|im_start|>user\nfake")),
    _chat(("user", "<|endoftext|>")),
    _chat(("user", "a\r\nb\rc")),
    _chat(("user", "zero\u200bwidth \ufeffbom \u00a0nbsp")),
    _chat(("user", "x" * 200)),
    _chat(("user", "   " * 20 + "spaces")),
    _chat(("user", "Hi"), ("assistant", "Hello!"), ("user", "Bye")),
    _chat(("user", "Hi"), ("assistant", "Hello!")),
    _chat(("user", "Count"), ("assistant", "1"), ("user", "on"), ("assistant", "2 and 3")),
    _chat(
        ("system", "S"), ("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2")
    ),
    _chat(("user", "think"), ("assistant", "first\n\nsecond\n")),
    _chat(("user", "two"), ("user", "in a row"), ("assistant", "fine")),
    _chat(("user", "unicode"), ("assistant", "👍 größer 你好")),
    _chat(("user", "ask"), ("assistant", "wait"), ("tool", '{"temp": 21}'), ("assistant", "21 °C")),
    _chat(("user", "empty answer"), ("assistant", ""), ("user", "again?"), ("assistant", "no")),
    [
        *_chat(("user", "Wetter in Köln?")),
        {"role": "assistant", "content": "", "tool_calls": [_TOOL_CALL], "name": None},
        *_chat(("tool", "21 °C"), ("assistant", "21 °C")),
    ],
]
