"""A chat over a pipe: what it prints, what it refuses, what Ctrl-C ends."""

import io
import signal
import sys
from dataclasses import replace

import pytest

from tests.policies import tiny_policy
from tunix.cli import chat
from tunix.errors import DataError, ModelError
from tunix.inference.engine import Engine
from tunix.inference.request import Request, derived_seed, sampling_params
from tunix.models.policy import answer_text, save_policy
from tunix.text import template
from tunix.text.tokenizer import Tokenizer

LENGTHS = {"max_prompt_tokens": 40, "max_completion_tokens": 8}


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


@pytest.fixture(scope="module")
def model(policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_policy(policy, folder)
    return str(folder)


@pytest.fixture
def talk(model, monkeypatch, capsys):
    """Chat with the model over standard input and return what both outputs got."""

    def run(*said, **fields):
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(said)))
        chat.run(chat.ChatConfig(model=model, **LENGTHS | fields))
        return capsys.readouterr()

    return run


def test_turns_go_on_from_the_ids_that_were_drawn(talk, policy):
    """Two turns made by hand: prompt, drawn ids, what the template adds, prompt, drawn ids."""
    config = chat.ChatConfig(model="", **LENGTHS)
    tokenizer, sampling = policy.tokenizer, sampling_params(config, policy.stop_ids)
    texts, ids = [], []
    with Engine(policy.config, policy.params, slots=8, max_positions=48) as engine:
        for turn, question in enumerate(["1+1=", "2+2="]):
            message = [{"role": "user", "content": question}]
            if ids and ids[-1] not in policy.stop_ids:
                ids.append(tokenizer.eos_id)
            ids += template.encode_chat(tokenizer, message)[bool(turn) :]  # one BOS
            (done,) = engine.generate_sync([Request(ids, sampling, derived_seed(0, turn))])
            ids = [*ids, *done.tokens.tolist()]
            texts.append(answer_text(policy, done.tokens))
    shown = talk("1+1=", "", "2+2=")
    assert shown.out.splitlines() == texts
    assert talk("1+1=", "2+2=").out == shown.out
    assert talk("1+1=", "2+2=", seed=1).out != shown.out


def test_commands(talk):
    shown = talk("1=", "/resett", "/exit", "2=")
    assert len(shown.out.splitlines()) == 1
    assert "unknown command '/resett'; did you mean '/reset'?" in shown.err
    said = ["1+1=", "2+2=", "3+3=", "4+4="]
    assert "tokens; at most 40 fit" in talk(*said).err
    shown = talk(*said[:2], "/reset", *said[2:])
    assert "at most" not in shown.err
    assert len(shown.out.splitlines()) == 4


def test_a_conversation_that_is_too_long_can_go_on(talk):
    """What does not fit is not kept."""
    shown = talk("1" * 50, "1=")
    assert "the conversation would have 54 tokens; at most 40 fit" in shown.err
    assert len(shown.out.splitlines()) == 1
    shown = talk("1" * 50, max_prompt_tokens=4000, max_completion_tokens=4000, stop=["a"])
    assert "at most" not in shown.err


def test_a_stop_string_is_never_shown(talk):
    free = talk("1=", max_completion_tokens=30).out
    stop = free[4:6]
    assert talk("1=", max_completion_tokens=30, stop=[stop]).out == free.partition(stop)[0] + "\n"


def test_control_c_ends_the_answer_and_not_the_chat(model, monkeypatch, capsys):
    class Interrupting(io.StringIO):
        pieces = 0

        def write(self, text):
            self.pieces += 1
            if self.pieces == 3:
                signal.raise_signal(signal.SIGINT)
            return super().write(text)

    monkeypatch.setattr(sys, "stdin", io.StringIO("1=\n2="))
    monkeypatch.setattr(sys, "stdout", Interrupting())
    # a worker of pytest-xdist ignores the signal
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        chat.run(chat.ChatConfig(model=model, max_prompt_tokens=400, max_completion_tokens=100))
    finally:
        signal.signal(signal.SIGINT, before)
    first, second = sys.stdout.getvalue().splitlines()
    assert first
    assert second
    assert capsys.readouterr().err.count("(interrupted)") == 1


def test_what_no_chat_can_be_had_with(policy, tmp_path):
    save_policy(replace(policy, tokenizer=None), tmp_path / "bare")
    with pytest.raises(ModelError, match="bare has no tokenizer"):
        chat.run(chat.ChatConfig(model=str(tmp_path / "bare")))
    plain = Tokenizer.characters("ab", chat_template=None)
    save_policy(replace(policy, tokenizer=plain), tmp_path / "plain")
    with pytest.raises(DataError, match="messages need a chat template"):
        chat.run(chat.ChatConfig(model=str(tmp_path / "plain")))
