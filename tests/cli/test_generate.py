import json

import jax
import pytest

from tunix.cli import evaluate, generate, main
from tunix.environments.verifiable import ALPHABET
from tunix.errors import ConfigError, DataError, RunError
from tunix.models import llama
from tunix.models.policy import Policy, save_policy
from tunix.text.tokenizer import Tokenizer

LENGTHS = {"max_prompt_tokens": 16, "max_completion_tokens": 8, "slots": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory, tiny_config):
    tokenizer = Tokenizer.characters(ALPHABET)
    assert tokenizer.eos_id is not None
    params = llama.initialize(jax.random.key(1), tiny_config)
    folder = tmp_path_factory.mktemp("model")
    save_policy(Policy(tiny_config, params, tokenizer, frozenset({tokenizer.eos_id})), folder)
    return str(folder)


def test_prompt_to_standard_output(model, capsys):
    config = generate.GenerateConfig(model=model, prompt="3+4=", samples=3, **LENGTHS)
    generate.run(config)
    first = capsys.readouterr().out
    assert len(first.splitlines()) == 3
    assert len(set(first.splitlines())) == 3
    generate.run(config)
    assert capsys.readouterr().out == first
    words = ["--model", model, "--prompt", "3+4=", "--samples", "3", "--seed", "1"]
    words += [word for name, value in LENGTHS.items() for word in (f"--{name}", str(value))]
    assert main.main(["generate", *words]) == 0
    assert capsys.readouterr().out != first


def test_file_to_file(model, tmp_path):
    rows = [{"id": "a", "question": "1+1="}, {"question": "2+2="}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    generate.run(
        generate.GenerateConfig(
            model=model,
            input=str(tmp_path / "in.jsonl"),
            prompt_field="question",
            output=str(tmp_path / "out.jsonl"),
            temperature=0.0,
            **LENGTHS,
        )
    )
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["id"] for row in written] == ["a", "in.jsonl:2"]
    assert all(1 <= row["completion_tokens"] <= 8 for row in written)
    assert {row["finish_reason"] for row in written} <= {"stop", "length"}


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({}, ConfigError, "prompt, input: expected exactly one"),
        ({"prompt": "a", "input": "b"}, ConfigError, "prompt, input: expected exactly one"),
        ({"input": "nowhere.jsonl"}, DataError, "nowhere.jsonl"),
        ({"prompt": "1" * 17}, DataError, r"tokens; expected between 1 and max_prompt_tokens"),
        ({"prompt": "1", "output": "/dev/null/x"}, RunError, "output: /dev/null/x cannot"),
    ],
)
def test_bad_requests(model, fields, kind, message):
    with pytest.raises(kind, match=message):
        generate.run(generate.GenerateConfig(model=model, **fields, **LENGTHS))


def test_evaluate_file(model, tmp_path, capsys):
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(5)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = evaluate.EvaluateConfig(
        model=model,
        tasks=str(tmp_path / "tasks.jsonl"),
        reward="regex:.*",
        output=str(tmp_path / "samples.jsonl"),
        as_json=True,
        max_tasks=4,
        **LENGTHS,
    )
    metrics = evaluate.run(config)
    assert json.loads(capsys.readouterr().out) == metrics
    assert metrics["tasks"] == 4
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [sample["answer"] for sample in samples] == ["1", "2", "3", "4"]


def test_evaluate_names_what_is_missing(model, tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'arithmetic'"):
        evaluate.run(evaluate.EvaluateConfig(model=model, tasks="arithmetics"))
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1"}\n')
    with pytest.raises(ConfigError, match="reward: nothing judges"):
        evaluate.run(evaluate.EvaluateConfig(model=model, tasks=str(tmp_path / "tasks.jsonl")))
