import json
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from tunix.cli import evaluate, generate, main
from tunix.config_parsing import load_config
from tunix.environments.verifiable import ALPHABET
from tunix.errors import ConfigError, DataError, RunError
from tunix.models import llama
from tunix.models.policy import Policy, load_policy, save_policy
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


def file_config(model, folder, rows, **fields):
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"input": str(folder / "in.jsonl"), "output": str(folder / "out.jsonl")} | fields
    return generate.GenerateConfig(model=model, **LENGTHS | fields)


ROWS = [
    {"id": "a", "question": "1+1=", "note": {"kept": [1, None]}},
    {"messages": [{"role": "user", "content": "2+2="}]},
    *({"question": f"{i}+3="} for i in range(9)),
]


def test_file_to_file(model, tmp_path):
    config = file_config(model, tmp_path, ROWS, prompt_field="question", samples=3)
    generate.run(config)
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [{k: v for k, v in row.items() if k != "completions"} for row in written] == ROWS
    for row in written:
        assert len(row["completions"]) == 3
        assert all(1 <= c["completion_tokens"] <= 8 for c in row["completions"])
        assert {c["finish_reason"] for c in row["completions"]} <= {"stop", "length"}
    texts = [c["text"] for row in written for c in row["completions"]]
    assert len(set(texts)) > 20  # of 33, some of them empty


def test_equal_rows_get_different_answers(model, tmp_path):
    generate.run(file_config(model, tmp_path, [{"id": "same", "prompt": "1="}] * 4))
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert len(set(lines)) == 4


def test_a_killed_command_goes_on(model, tmp_path, capsys):
    """Whatever a kill leaves: nothing, whole rows, half a row; the end is the same file."""
    config = file_config(model, tmp_path, ROWS, prompt_field="question", samples=2)
    generate.run(config)
    out = tmp_path / "out.jsonl"
    whole = out.read_bytes()
    first = whole.index(b"\n") + 1
    for left in (0, 7, first, first + 20, len(whole) - 1, len(whole)):
        out.write_bytes(whole[:left])
        generate.run(replace(config, slots=16))  # which has no part in the answers
        assert out.read_bytes() == whole
    assert "out.jsonl: 11 of 11 rows are there" in capsys.readouterr().err
    more = file_config(model, tmp_path, [*ROWS, {"question": "9+9="}], prompt_field="question")
    generate.run(replace(more, samples=2))
    assert out.read_bytes().startswith(whole)
    assert len(out.read_text().splitlines()) == 12


def test_a_file_of_other_settings_is_not_gone_on_with(model, tmp_path, tiny_config):
    config = file_config(model, tmp_path, ROWS[:3], prompt_field="question")
    generate.run(config)
    out = tmp_path / "out.jsonl"
    whole = out.read_bytes()
    for change, message in (
        ({"temperature": 0.5}, r"was made with temperature = 1\.0, now it is 0\.5; choose another"),
        ({"seed": 4}, "seed = 0, now it is 4"),
        ({"stop": ["a"]}, r"stop = None, now it is \['a'\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            generate.run(replace(config, **change))
    other = tmp_path / "other"
    policy = load_policy(model)
    params = llama.initialize(jax.random.key(2), tiny_config)
    save_policy(replace(policy, params=params), other)
    with pytest.raises(ConfigError, match="weights_crc32"):
        generate.run(replace(config, model=str(other)))
    with pytest.raises(DataError, match=r"out\.jsonl:2: is not the answer to .*in\.jsonl:2"):
        generate.run(file_config(model, tmp_path, [ROWS[0], ROWS[3]], prompt_field="question"))
    assert out.read_bytes() == whole
    (tmp_path / "out.jsonl.settings.json").unlink()
    with pytest.raises(ConfigError, match=r"out\.jsonl exists, but out\.jsonl\.settings\.json"):
        generate.run(config)
    assert out.read_bytes() == whole


def test_stop_strings_end_and_cut_answers(model, tmp_path):
    """The same draws as without; the text ends before the first letter e."""
    rows = [{"prompt": f"{i}="} for i in range(24)]
    results = {}
    for name, fields in (("free", {}), ("cut", {"stop": ["e"]}), ("kept", {"include_stop": True})):
        folder = tmp_path / name
        folder.mkdir()
        stop = fields if name != "kept" else {"stop": ["e"], "include_stop": True}
        generate.run(file_config(model, folder, rows, max_completion_tokens=40, **stop))
        lines = (folder / "out.jsonl").read_text().splitlines()
        results[name] = [json.loads(line)["completions"][0] for line in lines]
    stopped = 0
    for free, short, kept in zip(*results.values(), strict=True):
        before, found, _ = free["text"].partition("e")
        assert (short["text"], kept["text"]) == (before, before + found)
        assert short["completion_tokens"] == kept["completion_tokens"]
        if found:
            stopped += 1
            assert short["finish_reason"] == "stop"
            assert short["completion_tokens"] < free["completion_tokens"]
    assert stopped > 3


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({}, ConfigError, "prompt, input: expected exactly one"),
        ({"prompt": "a", "input": "b"}, ConfigError, "prompt, input: expected exactly one"),
        ({"input": "nowhere.jsonl"}, DataError, "nowhere.jsonl"),
        ({"prompt": "1" * 17}, DataError, r"tokens; expected between 1 and max_prompt_tokens"),
        (
            {"prompt": "1" * 20, "max_prompt_tokens": 600, "max_completion_tokens": 500},
            DataError,
            r"and 12: the model's context \(512\) less max_completion_tokens \(500\)",
        ),
        ({"prompt": "1", "output": "/dev/null/x"}, RunError, "output: /dev/null/x cannot"),
    ],
)
def test_bad_requests(model, fields, kind, message):
    with pytest.raises(kind, match=message):
        generate.run(generate.GenerateConfig(model=model, **LENGTHS | fields))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"promt": "1"}, r"in\.jsonl:2: no field 'prompt'.*did you mean 'promt'"),
        ({"prompt": 5}, r"in\.jsonl:2: field 'prompt': expected a text or a list"),
        ({"prompt": "1" * 30}, r"in\.jsonl:2: the prompt has 34 tokens"),
        ({"prompt": "1", "completions": 1}, r"in\.jsonl:2: field 'completions' is where"),
    ],
)
def test_a_bad_row_is_named_before_anything_is_generated(model, tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        generate.run(file_config(model, tmp_path, [{"prompt": "1="}, row]))
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("text", ["###", "['']", "5"])
def test_what_is_no_list_of_stop_strings_is_refused(text):
    """A # begins a comment in YAML; it must not be read as nothing."""
    with pytest.raises(ConfigError, match=r"stop: .* on the command line"):
        load_config(generate.GenerateConfig, {"model": "m"}, ["--stop", text])
    read = load_config(generate.GenerateConfig, {"model": "m"}, ["--stop", '["###", "\\n"]'])
    assert read.stop == ["###", "\n"]


def test_the_documented_python(model, capsys):
    page = (Path(__file__).parents[2] / "docs" / "generation.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    assert '"my-model"' in code
    exec(code.replace('"my-model"', repr(model)), {})
    assert len(capsys.readouterr().out.splitlines()) >= 8


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


def test_evaluate_refuses_lengths_beyond_the_context(model, tmp_path):
    lengths = {"max_prompt_tokens": 500, "max_completion_tokens": 100}
    with pytest.raises(
        ConfigError, match=r"500 \+ 100 = 600, more than the model's context of 512"
    ):
        evaluate.run(evaluate.EvaluateConfig(model=model, tasks="arithmetic", **lengths))


def test_evaluate_names_what_is_missing(model, tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'arithmetic'"):
        evaluate.run(evaluate.EvaluateConfig(model=model, tasks="arithmetics"))
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1"}\n')
    with pytest.raises(ConfigError, match="reward: nothing judges"):
        evaluate.run(evaluate.EvaluateConfig(model=model, tasks=str(tmp_path / "tasks.jsonl")))
