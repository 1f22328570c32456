import io
import os
import sys
import types
from pathlib import Path

import pytest

from tunix.cli import commands, main
from tunix.cli.commands import COMMANDS, Command
from tunix.config import RunConfig
from tunix.errors import RunError


@pytest.fixture
def fake(monkeypatch):
    """A command ``fake`` whose function a test sets."""
    module = types.ModuleType("fake_command")
    module.FakeConfig = RunConfig
    module.seen = []
    module.run = module.seen.append
    monkeypatch.setitem(sys.modules, "fake_command", module)
    monkeypatch.setitem(
        main.COMMANDS, "fake", Command("fake_command:FakeConfig", "fake_command:run", "for tests")
    )
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", os.environ["JAX_COMPILATION_CACHE_DIR"])
    return module


def test_every_command_exists():
    for name, command in COMMANDS.items():
        assert command.config_class().__dataclass_fields__, name
        if not command.function.startswith("tunix.api"):
            assert callable(command.load())


def test_overview_and_version(capsys):
    assert main.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name}" in shown for name in COMMANDS)
    assert main.main([]) == 2
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out.endswith("tunix 0.1.0\n")


def test_unknown_command(capsys):
    assert main.main(["gpro"]) == 2
    error = capsys.readouterr().err
    assert "unknown command 'gpro'; did you mean 'grpo'?" in error
    assert len(error.splitlines()) == 1


def test_config_reaches_the_function(fake, tmp_path):
    assert main.main(["fake", "--seed", "3", "--run-folder", str(tmp_path)]) == 0
    assert fake.seen == [RunConfig(seed=3, run_folder=str(tmp_path))]


def test_an_unset_run_folder_is_settled(fake):
    assert main.main(["fake"]) == 0
    assert Path(fake.seen[0].run_folder).parent == Path("runs")


def test_errors_are_one_line_and_have_a_code(fake, capsys, monkeypatch):
    assert main.main(["fake", "--seeed", "3"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tunix fake: unknown field 'seeed'")
    assert "did you mean 'seed'" in error
    assert len(error.splitlines()) == 1
    monkeypatch.setattr(commands, "COMMANDS", {"fake": main.COMMANDS["fake"]})

    def fail(config):
        raise RunError("no room")

    fake.run = fail
    assert main.main(["fake"]) == 1
    assert capsys.readouterr().err == "tunix fake: no room\n"


def test_interrupted_says_how_to_go_on(fake, tmp_path, capsys):
    def interrupted(config):
        raise KeyboardInterrupt

    fake.run = interrupted
    words = ["fake", "--run_folder", str(tmp_path)]
    assert main.main(words) == 130
    assert "nothing was computed yet" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    assert main.main(words) == 130
    error = capsys.readouterr().err
    told = error.partition("go on with: tunix ")[2].split()
    seen = []
    fake.run = seen.append
    assert main.main(told) == 0
    assert seen == [RunConfig(run_folder=str(tmp_path), resume=True)]


def test_broken_pipe_is_quiet(fake, monkeypatch, capsys, tmp_path):
    def broken(config):
        raise BrokenPipeError

    fake.run = broken
    with open(tmp_path / "out", "w") as out:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out.buffer))
        assert main.main(["fake"]) == 1
        sys.stdout.detach()


def test_help_of_a_command(fake, capsys):
    assert main.main(["fake", "--help"]) == 0
    assert "Fixes every random choice of the run." in capsys.readouterr().out
    assert fake.seen == []


def test_compilation_cache(monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "mine")
    main.use_compilation_cache()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "mine"
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    main.use_compilation_cache()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == os.path.join("cache", "tunix", "jax")
