"""``tunix convert``: write a model, a run's or an adapter as a Hugging Face or PEFT folder."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass
from safetensors import SafetensorError

from tunix.config import STRICT
from tunix.errors import ConfigError, RunError
from tunix.models import peft
from tunix.models.policy import Policy, load_policy, locate, merged, save_policy
from tunix.training.trained_model import find_run, load_trained

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ConvertConfig:
    """Write a model as a Hugging Face folder, or its adapter as a PEFT folder."""

    model: str
    """Hugging Face folder, .gguf file, package:NAME, PEFT adapter folder, run folder, or one of
    the run's checkpoints (RUN/checkpoints/STEP); of a run folder it is the newest."""
    output: str
    """Folder to write; it appears when it is complete."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights that are written; an adapter alone is always float32."""
    adapter_only: bool = False
    """Write the adapter, which names its base; otherwise it is merged into the weights."""
    max_shard_size: Annotated[str, Field(pattern=r"^[1-9]\d*(KB|MB|GB)$")] = "5GB"
    """Largest file of weights, in KB, MB or GB of powers of ten."""
    overwrite: bool = False
    """Replace the model that is in output."""


def run(config: ConvertConfig) -> None:
    """Load, convert, and write the folder whole or not at all.

    Raises:
        ConfigError: output is in use, is where the model comes from, or there is no adapter.
        ModelError, RunError: the model cannot be read, or the output cannot be written.
    """
    output = Path(config.output).expanduser().absolute()
    check_output(output, config)
    policy = load_source(config.model, config.dtype)
    if config.adapter_only and policy.adapter is None:
        raise ConfigError(f"adapter_only: true, but {config.model} has no adapter")
    if policy.adapter is not None:
        refuse_source(output, policy.source)
    if not config.adapter_only:
        policy = merged(policy)
    most = int(config.max_shard_size[:-2]) * UNITS[config.max_shard_size[-2:]]
    with whole_folder(output) as partial:
        save_policy(policy, partial, max_shard_bytes=most)
    sizes = [file.stat().st_size for file in output.glob("*.safetensors")]
    kind = "PEFT adapter" if config.adapter_only else f"{config.dtype} model"
    print(f"{output}: {kind}, {sum(sizes) / 1e6:,.2f} MB in {len(sizes)} file(s)")


def load_source(source: str, dtype: str) -> Policy:
    """Load whatever ``ConvertConfig.model`` may name.

    Raises:
        ModelError, RunError: it cannot be read.
    """
    found = find_run(source)
    return load_policy(source, dtype) if found is None else load_trained(*found, dtype)


def check_output(output: Path, config: ConvertConfig) -> None:
    """Refuse an output that would destroy something.

    Raises:
        ConfigError: it is no folder, is in use without ``overwrite``, holds something other than
            a model, or the model to be converted.
    """
    if output.exists() and not output.is_dir():
        raise ConfigError(f"output: {output} is a file; expected a folder")
    if not output.exists() or not any(output.iterdir()):
        return
    if not config.overwrite:
        raise ConfigError(f"output: {output} is not empty; choose another, or set overwrite")
    if not any((output / name).is_file() for name in ("config.json", peft.CONFIG)):
        raise ConfigError(f"output: {output} holds no model; overwrite replaces nothing else")
    refuse_source(output, config.model)


def refuse_source(output: Path, source: str) -> None:
    """Refuse to write over the model that ``source`` names or over what is below it.

    Raises:
        ConfigError: ``source`` is ``output`` or within it.
    """
    origin = locate(source).resolve()
    if output.resolve() in (origin, *origin.parents):
        raise ConfigError(f"output: {output} holds {origin}, which is needed; choose another")


@contextlib.contextmanager
def whole_folder(output: Path) -> Iterator[Path]:
    """Yield a folder beside ``output`` that takes its place at the end; on an error it goes.

    Raises:
        RunError: the disk is full, say.
    """
    partial = output.with_name(f".{output.name}.partial")
    before = output.with_name(f".{output.name}.replaced")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a conversion that was killed
        partial.mkdir(parents=True)
        yield partial
        if output.exists():
            shutil.rmtree(before, ignore_errors=True)
            os.replace(output, before)
        os.replace(partial, output)
        shutil.rmtree(before, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunError(f"output: {output} cannot be written: {reason}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
