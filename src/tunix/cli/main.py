"""The ``tunix`` command: ``tunix COMMAND --config file.yaml --field value``.

Exit codes: 0 done, 1 the run could not go on, 2 a wrong command or config, 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tunix
from tunix.cli.commands import COMMANDS, Command, fields_by_command
from tunix.errors import ConfigError, TunixError, nearest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (that of the process by default) and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words[0] if words else "--help"
    if name in ("--help", "-h", "help"):
        print(overview(), end="")
        return 0 if words else 2
    if name == "--version":
        print(f"tunix {tunix.__version__}")
        return 0
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        close = nearest(name, COMMANDS)
        print(f"tunix: unknown command {name!r}{close} (known: {known})", file=sys.stderr)
        return 2
    try:
        return run_command(name, COMMANDS[name], words[1:])
    except TunixError as error:
        print(f"tunix {name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def overview() -> str:
    """Text of ``tunix --help``."""
    rows = "".join(f"  {name:<10}{command.summary}\n" for name, command in COMMANDS.items())
    return (
        "usage: tunix COMMAND [--config FILE] [--FIELD VALUE ...]\n\n"
        f"{tunix.__doc__}\n\ncommands:\n{rows}\n"
        "tunix COMMAND --help lists the fields with meaning, type and default;\n"
        "tunix COMMAND --print-config prints the config that would be used.\n"
    )


def run_command(name: str, command: Command, words: Sequence[str]) -> int:
    """Parse a command's words, run it, and return the exit code.

    Raises:
        TunixError: what a person can act on.
    """
    from tunix.config_parsing import parse_command

    use_compilation_cache()
    config = parse_command(command.config_class(), name, words, elsewhere=fields_by_command)
    if config is None:
        return 0
    config = with_run_folder(name, config)
    try:
        command.load()(config)
    except KeyboardInterrupt:
        print(f"\ntunix {name}: interrupted; {how_to_go_on(name, config)}", file=sys.stderr)
        return 130
    return 0


def with_run_folder(name: str, config: Any) -> Any:
    """Settle the run folder here, so that an interrupted run can be named."""
    if getattr(config, "run_folder", "") is not None or config.resume:
        return config
    from tunix.training.run_folder import default_folder

    return dataclasses.replace(config, run_folder=str(default_folder(name)))


def how_to_go_on(name: str, config: Any) -> str:
    """Say how an interrupted run is continued."""
    folder = getattr(config, "run_folder", None)
    if folder is None:
        return "nothing is lost by starting it again"
    recorded = Path(folder) / "config.yaml"
    if not recorded.exists():
        return "nothing was computed yet"
    return f"go on with: tunix {name} --config {recorded} --run_folder {folder} --resume"


def use_compilation_cache() -> None:
    """Let jax keep compiled programs between runs, in the user's cache folder.

    Does nothing where JAX_COMPILATION_CACHE_DIR is set; must come before jax is imported.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(base, "tunix", "jax")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")


if __name__ == "__main__":
    sys.exit(main())
