"""From YAML files, dictionaries and ``--field value`` to a checked config, or one line of error.

jsonargparse reads texts by the fields' types and writes ``--help``; pydantic, in the config class
itself, judges values. Names are checked here, so that an unknown one is answered with the nearest.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import pydantic_core
import yaml

from tunix.errors import ConfigError, nearest

Config = TypeVar("Config")

Elsewhere = Callable[[], Mapping[str, Iterable[str]]]
"""Returns the field names of other commands' configs, to say where a misplaced field belongs."""

COMMAND_LINE = "on the command line"


def load_config(
    config_class: type[Config],
    source: str | Path | Mapping[str, Any] | Config | None = None,
    overrides: Sequence[str] = (),
    *,
    elsewhere: Elsewhere | None = None,
) -> Config:
    """Make a config from a YAML file, a dictionary or an instance, and ``--field value`` on top.

    ``overrides`` are words as a shell splits them; ``--learning-rate`` and ``--learning_rate``,
    ``--seed 1`` and ``--seed=1``, ``--resume`` and ``--resume true`` mean the same, and
    ``--config FILE`` is read before the fields beside it.

    Raises:
        ConfigError: one line with the field, its value, where it stands and what was expected.
    """
    if isinstance(source, config_class) and not overrides:
        return source
    return _build(config_class, collect_values(config_class, source, overrides, elsewhere))


def parse_command(
    config_class: type[Config],
    command: str,
    arguments: Sequence[str],
    *,
    elsewhere: Elsewhere | None = None,
) -> Config | None:
    """Make a config from a command's words, or print what was asked for and return None.

    ``--help`` prints each field's meaning, type and default; ``--print-config`` the resolved
    config as YAML, which ``--config`` reads.

    Raises:
        ConfigError: as ``load_config``.
    """
    if any(word in ("--help", "-h") for word in arguments):
        print(format_help(config_class, command), end="")
        return None
    kept = [word for word in arguments if _field_name(word) != "print_config"]
    values = collect_values(config_class, None, kept, elsewhere)
    if len(kept) < len(arguments):
        print(format_config(config_class, values), end="")
        return None
    return _build(config_class, values)


def collect_values(
    config_class: type,
    source: Any,
    overrides: Sequence[str] = (),
    elsewhere: Elsewhere | None = None,
) -> dict[str, Any]:
    """Gather the given values by field, converted to the fields' types where they are texts.

    Raises:
        ConfigError: as ``load_config``.
    """
    texts, files = _split(config_class, overrides)
    values = _source_values(config_class, source, elsewhere)
    for file in files:
        values |= _read_file(config_class, file, elsewhere)
    _check_names(config_class, texts, COMMAND_LINE, elsewhere)
    return values | _convert(config_class, texts, COMMAND_LINE)


def format_help(config_class: type, command: str) -> str:
    """Text of ``tunix COMMAND --help``: each field's meaning, type and default."""
    from jsonargparse import ArgumentParser, set_parsing_settings

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog=f"tunix {command}",
        usage=f"tunix {command} [--config FILE] [--FIELD VALUE ...] [--print-config]",
        add_help=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with lines of `field: value`.")
    parser.add_argument(
        "--print-config", action="store_true", help="Print the resolved config and end."
    )
    parser.add_class_arguments(config_class)
    # jsonargparse offers --FIELD+ for lists, which is not ours
    return re.sub(r", --\w+\+ \S+", "", parser.format_help())


def format_config(config_class: type, values: Mapping[str, Any]) -> str:
    """Render values and the defaults of the other fields as YAML; what is required is null."""
    rows = {}
    for field in dataclasses.fields(config_class):
        rows[field.name] = values.get(field.name, _default(field))
    return yaml.safe_dump(rows, sort_keys=False)


def _default(field: dataclasses.Field) -> Any:
    # pydantic may leave its own description of a field where dataclasses keep the default
    described = field.default
    default = getattr(described, "default", described)
    factory = getattr(described, "default_factory", None) or field.default_factory
    if callable(factory):
        return factory()
    missing = default is dataclasses.MISSING or default is pydantic_core.PydanticUndefined
    return None if missing else default


def field_names(config_class: type) -> list[str]:
    """Names of a config's fields."""
    return [field.name for field in dataclasses.fields(config_class)]


def _source_values(config_class: type, source: Any, elsewhere: Elsewhere | None) -> dict[str, Any]:
    if source is None:
        return {}
    if isinstance(source, config_class):
        assert dataclasses.is_dataclass(source)
        return {name: getattr(source, name) for name in field_names(config_class)}
    if isinstance(source, str | Path):
        return _read_file(config_class, source, elsewhere)
    if isinstance(source, Mapping):
        values = {str(name): value for name, value in source.items()}
        _check_names(config_class, values, "in the given dictionary", elsewhere)
        return values
    raise ConfigError(
        f"config: got {type(source).__name__}; expected {config_class.__name__}, a dictionary or "
        "the path of a YAML file"
    )


def _split(config_class: type, words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the values by field and the files of ``--config``."""
    switches = {f.name for f in dataclasses.fields(config_class) if f.type in (bool, "bool")}
    values: dict[str, str] = {}
    files: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name = _field_name(word)
        if name is None:
            raise ConfigError(f"unexpected {word!r} {COMMAND_LINE}; expected --field value")
        if "=" in word:
            value = word.partition("=")[2]
        elif rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        elif name in switches:
            value = "true"
        else:
            raise ConfigError(f"{name}: no value {COMMAND_LINE}; expected --{name} VALUE")
        if name == "config":
            files.append(value)
        else:
            values[name] = value
    return values, files


def _field_name(word: str) -> str | None:
    if not word.startswith("--") or len(word) == 2:
        return None
    return word[2:].partition("=")[0].replace("-", "_")


def _read_file(config_class: type, path: str | Path, elsewhere: Elsewhere | None) -> dict[str, Any]:
    path = Path(path).expanduser()
    try:
        values = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        near = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(f"no such config file: {path}{nearest(path.name, near)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(
            f"config file {path} is not YAML: {' '.join(str(error).split())}"
        ) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"config file {path} holds no fields; expected lines of `field: value`")
    values = {str(name).replace("-", "_"): value for name, value in values.items()}
    where = f"in {path}"
    _check_names(config_class, values, where, elsewhere)
    return _convert(config_class, values, where)


def _check_names(
    config_class: type, values: Mapping[str, Any], where: str, elsewhere: Elsewhere | None
) -> None:
    known = field_names(config_class)
    for name, value in values.items():
        if name in known:
            continue
        others = elsewhere() if elsewhere is not None else {}
        owners = [command for command, fields in others.items() if name in fields]
        if owners:
            raise ConfigError(
                f"misplaced field {name!r} (value {value!r}) {where}: it belongs to "
                f"{' and '.join(owners)}"
            )
        raise ConfigError(f"unknown field {name!r} (value {value!r}) {where}{nearest(name, known)}")


def _convert(config_class: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Convert texts by the fields' types; also ``1e-5``, which is a text in YAML 1.1."""
    if not values:
        return {}
    from argparse import ArgumentError

    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    hints = typing.get_type_hints(config_class)
    for name in values:
        parser.add_argument(f"--{name}", type=hints[name])
    converted = {}
    for name, value in values.items():
        try:
            found = parser.parse_object({name: value}, defaults=False)[name]
        except ArgumentError:
            found = value  # pydantic says in better words what is wrong
        if isinstance(value, str) and value.lstrip().startswith("#"):
            found = value  # a comment in YAML, which would read as null
        fault = _fault(config_class, {name: found}, name)
        if fault is not None:
            raise ConfigError(f"{name}: {value!r} {where}; {fault}")
        converted[name] = found
    return converted


def _build(config_class: type[Config], values: Mapping[str, Any]) -> Config:
    try:
        return config_class(**values)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else config_class.__name__
        if first["type"] == "missing":
            raise ConfigError(f"{name}: not set, and it has no default") from None
        raise ConfigError(f"{name}: {first['input']!r}; {_expected(error.errors())}") from None


def _fault(config_class: type, values: Mapping[str, Any], name: str) -> str | None:
    """Say what was expected of a field, None where its value is right."""
    try:
        config_class(**values)
    except pydantic.ValidationError as error:
        own = [e for e in error.errors() if e["loc"][:1] == (name,) and e["type"] != "missing"]
        return _expected(own) if own else None
    return None


def _expected(errors: Sequence[Any]) -> str:
    message = str(errors[0]["msg"])
    return message.replace("Input should be", "expected", 1)
