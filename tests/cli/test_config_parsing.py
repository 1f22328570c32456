import pytest
import yaml

from tunix.algorithms.language.sft import SFTConfig
from tunix.config import PolicyGradientConfig
from tunix.config_parsing import format_config, format_help, load_config, parse_command
from tunix.errors import ConfigError


def elsewhere():
    return {"sft": ["batch_size", "model"], "grpo": ["model"]}


def load(*arguments):
    return load_config(PolicyGradientConfig, *arguments, elsewhere=elsewhere)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: m\nlearning-rate: 1e-3\nsteps: 3\ntop_k: null\n")
    return path


def test_file_overrides_and_instances_give_the_same(file):
    expected = PolicyGradientConfig(model="m", learning_rate=1e-3, steps=3)
    assert load(file) == expected
    assert load(str(file)) == expected
    assert load(None, ["--config", str(file)]) == expected
    assert load({"model": "m", "learning_rate": 1e-3, "steps": 3}) == expected
    assert load(expected) is expected
    assert load(expected, ["--steps", "4"]).steps == 4


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--learning_rate", "2e-5"], "learning_rate", 2e-5),
        (["--learning-rate=2e-5"], "learning_rate", 2e-5),
        (["--learning_rate", "1"], "learning_rate", 1.0),
        (["--steps=7", "--config=FILE"], "steps", 7),
        (["--resume"], "resume", True),
        (["--resume", "--seed", "3"], "resume", True),
        (["--tensorboard", "false"], "tensorboard", False),
        (["--top_k", "5"], "top_k", 5),
        (["--top_k", "null"], "top_k", None),
        (["--run_folder", "123"], "run_folder", "123"),
        (["--system", "be: brief, [x] #1"], "system", "be: brief, [x] #1"),
        (["--reward", "regex:=-?\\d+"], "reward", "regex:=-?\\d+"),
        (["--reward", '{"math": 1, "a:b": 0.5}'], "reward", {"math": 1.0, "a:b": 0.5}),
        (["--console", "plain"], "console", "plain"),
        (["--success_reward", "-1.5"], "success_reward", -1.5),
    ],
)
def test_command_line_values(file, words, field, value):
    words = [word.replace("FILE", str(file)) for word in words]
    assert getattr(load(file, words), field) == value


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--learning_rat", "1"],
            r"unknown field 'learning_rat' \(value '1'\) on the command line; did you mean "
            "'learning_rate'",
        ),
        (["--batch_size", "3"], r"misplaced field 'batch_size' .* belongs to sft"),
        (["--learning_rate", "abc"], "learning_rate: 'abc' on the command line; expected a valid"),
        (["--learning_rate", "-1"], "learning_rate: '-1' .*; expected greater than 0"),
        (["--learning_rate", "nan"], "learning_rate: 'nan'"),
        (["--seed", "1.5"], "seed: '1.5' .*; expected a valid integer"),
        (["--resume", "maybe"], "resume: 'maybe' .*; expected a valid boolean"),
        (["--console", "lif"], "console: 'lif' .*; expected 'auto', 'live', 'plain' or 'none'"),
        (["--top_p", "null"], "top_p: 'null'"),
        (["--reward", '{"math": .inf}'], "reward: .*expected a finite number"),
        (["--temperature", "0"], "temperature: '0' .*; expected greater than 0"),
        (["--steps"], "steps: no value"),
        (["steps", "3"], "unexpected 'steps'"),
        (["--config", "nowhere.yaml"], "no such config file: nowhere.yaml"),
    ],
)
def test_command_line_errors_are_one_line(words, message):
    with pytest.raises(ConfigError, match=message) as error:
        load({"model": "m"}, words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: m\nlearning_rat: 1\n", r"unknown field 'learning_rat' \(value 1\) in .*run.yaml"),
        ("model: m\nbatch_size: 1\n", r"misplaced field 'batch_size' \(value 1\) in .*run.yaml"),
        ("model: 3\n", "model: 3 in .*run.yaml; expected a valid string"),
        ("model: m\nsteps: many\n", "steps: 'many' in .*; expected a valid integer"),
        ("model: m\nsteps: 0\n", "steps: 0 in .*; expected greater than or equal to 1"),
        ("model: m\nsteps: [1]\n", r"steps: \[1\] in"),
        ("model: [\n", "is not YAML"),
        ("just words\n", "holds no fields"),
        ("steps: 3\n", "model: not set"),
        ("", "model: not set"),
    ],
)
def test_file_errors_are_one_line(file, text, message):
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load(file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"model": "m", "learning_rate": "1e-5"}, "learning_rate: '1e-5'; expected a valid number"),
        ({"model": "m", "stepz": 3}, "unknown field 'stepz' .* in the given dictionary"),
        ({"model": "m", "seed": True}, "seed: True; expected a valid integer"),
        (3, "config: got int; expected PolicyGradientConfig"),
        (SFTConfig(model="m"), "config: got SFTConfig"),
    ],
)
def test_python_sources_are_strict(source, message):
    with pytest.raises(ConfigError, match=message):
        load(source)


def test_nearest_config_file(file):
    with pytest.raises(ConfigError, match=r"did you mean 'run.yaml'"):
        load(file.with_name("rum.yaml"))


@pytest.mark.parametrize("config_class", [PolicyGradientConfig, SFTConfig])
def test_help_has_every_field_with_meaning_and_default(config_class, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = format_help(config_class, "some")
    for name in config_class.__dataclass_fields__:
        assert f"--{name} " in text
    assert "Peak learning rate of AdamW; eta. (type: float, default: 1e-05)" in text
    assert text.startswith("usage: tunix some")


def test_print_config_reads_back(file, capsys):
    words = ["--config", str(file), "--seed", "9", "--print-config"]
    assert parse_command(PolicyGradientConfig, "grpo", words) is None
    printed = capsys.readouterr().out
    file.write_text(printed)
    assert load(file) == PolicyGradientConfig(model="m", learning_rate=1e-3, steps=3, seed=9)
    assert parse_command(PolicyGradientConfig, "grpo", ["--print_config"]) is None
    assert yaml.safe_load(capsys.readouterr().out)["model"] is None


def test_format_config_round_trips_small_numbers(file):
    text = format_config(PolicyGradientConfig, {"model": "m", "learning_rate": 1e-7})
    file.write_text(text)
    assert load(file).learning_rate == 1e-7
