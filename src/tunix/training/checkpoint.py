"""Checkpoints: the whole state of a run, written beside the training, whole or not at all.

orbax writes the arrays; which checkpoints stay is decided here, since the older one may go only
after the newer is on disk (orbax's own manager deletes after a failed save, too).
"""

from __future__ import annotations

import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from tunix.errors import RunError

_COMPLETE = re.compile(r"\d+")
_LEFTOVER = re.compile(r"\d+\.(orbax-checkpoint-tmp|deleted).*")


class Checkpoints:
    """The checkpoints in a folder: the newest ``keep``, and the best by score besides.

    Raises:
        RunError: the folder cannot be made or written.
    """

    def __init__(self, folder: str | Path, keep: int, keep_best: bool = True):
        self.folder = Path(folder).absolute()
        self.keep = keep
        self.keep_best = keep_best
        self._saving: int | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for entry in self.folder.iterdir():
                if _LEFTOVER.fullmatch(entry.name):
                    shutil.rmtree(entry)
        except OSError as error:
            raise RunError(f"checkpoint folder {self.folder} cannot be used: {error}") from None
        self._checkpointer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        self._scores = {step: self._read_score(step) for step in self.steps()}

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending; one that is being written is not there."""
        return complete_steps(self.folder)

    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint, None where there is none."""
        return max(self.steps(), default=None)

    def save(
        self, step: int, state: Any, record: dict[str, Any], score: float | None = None
    ) -> None:
        """Start saving ``state``, a pytree of arrays, and ``record``, which JSON can hold.

        The arrays are copied before this returns, so their buffers may be donated right after; the
        writing goes on in the background. Waits for the save before it. A step that is saved
        already stays as it is: the state is a function of the step.

        Raises:
            RunError: this save could not be started or the one before it failed.
        """
        self.wait()
        score = None if score is None or math.isnan(score) else float(score)
        if step in self.steps():
            if score is not None:
                self._write_late_score(step, score)
            return
        leaves = _flatten(state)
        content = {
            "score": score,
            "record": record,
            "leaves": {path: _described(leaf) for path, leaf in leaves.items()},
        }
        # an array without elements is its description; orbax refuses it
        copies = {path: _copied(leaf) for path, leaf in leaves.items() if _size(leaf)}
        self._saving = step
        try:
            self._checkpointer.save(
                self.folder / str(step),
                ocp.args.Composite(
                    state=ocp.args.PyTreeSave(copies), record=ocp.args.JsonSave(content)
                ),
            )
        except Exception as error:
            raise self._failed(error) from error
        self._scores[step] = score

    def check(self) -> None:
        """Look, without waiting, whether a background save failed.

        Raises:
            RunError: names the save and the folder.
        """
        try:
            self._checkpointer.check_for_errors()
        except Exception as error:
            raise self._failed(error) from error

    def wait(self) -> None:
        """Wait until what was saved is on disk, then remove what need not be kept.

        Raises:
            RunError: names the save that failed and the folder; nothing is removed then.
        """
        if self._saving is None:
            return
        try:
            self._checkpointer.wait_until_finished()
            if self._saving not in self.steps():
                raise OSError("the files are not there")
        except Exception as error:
            raise self._failed(error) from error
        self._saving = None
        self._prune()

    def close(self) -> None:
        """Wait for background work and end its threads; safe to call twice."""
        try:
            self.wait()
        finally:
            self._checkpointer.close()

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Return the state of a step, in the structure of ``like``, and its record.

        ``like`` is a pytree of arrays or ``jax.ShapeDtypeStruct``; each leaf comes back with its
        shape, dtype and sharding, as numpy where it is numpy, with the bits that were saved.

        Raises:
            RunError: a leaf is missing, left over, or of another shape or dtype; nothing is cast.
        """
        content = self._read_record(step)
        wanted = _flatten(like)
        self._check_leaves(step, content["leaves"], wanted)
        targets = {path: _target(leaf) for path, leaf in wanted.items() if _size(leaf)}
        arguments = ocp.args.PyTreeRestore(
            item=targets,
            restore_args={path: _restore_argument(leaf) for path, leaf in targets.items()},
        )
        try:
            restored = self._checkpointer.restore(
                self.folder / str(step), ocp.args.Composite(state=arguments)
            )["state"]
        except Exception as error:
            raise RunError(f"{self.folder / str(step)} cannot be read: {error}") from error
        leaves = [_like(restored.get(path), leaf) for path, leaf in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), content["record"]

    def _read_score(self, step: int) -> float | None:
        late = self.folder / f"{step}.score"
        return float(late.read_text()) if late.is_file() else self._read_record(step)["score"]

    def _write_late_score(self, step: int, score: float) -> None:
        """Keep a score that was known only after the step was saved, beside the checkpoint."""
        self._scores[step] = score
        partial = self.folder / f"{step}.score.partial"
        try:
            partial.write_text(repr(score))
            os.replace(partial, self.folder / f"{step}.score")
        except OSError as error:
            raise self._failed(error) from error

    def _read_record(self, step: int) -> dict[str, Any]:
        return _read_record(self._checkpointer, self.folder / str(step))

    def _check_leaves(self, step: int, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
        faults = []
        for path in sorted(saved.keys() | wanted.keys()):
            if path not in wanted:
                faults.append(f"{path} is only in the checkpoint")
            elif path not in saved:
                faults.append(f"{path} is missing in the checkpoint")
            elif saved[path] != _described(wanted[path]):
                here = _described(wanted[path])
                faults.append(f"{path} is {_shown(saved[path])}, expected {_shown(here)}")
        if faults:
            more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
            raise RunError(
                f"{self.folder / str(step)} is the checkpoint of another model or optimizer: "
                f"{'; '.join(faults[:5])}{more}"
            )

    def _prune(self) -> None:
        steps = self.steps()
        kept = set(steps[-self.keep :])
        scored = [s for s in steps if self._scores.get(s) is not None]
        if self.keep_best and scored:
            kept.add(max(scored, key=lambda step: (self._scores[step], step)))
        for step in set(steps) - kept:
            # renamed first: killed half-way, what is left is not taken for a checkpoint
            unwanted = self.folder / f"{step}.deleted"
            os.replace(self.folder / str(step), unwanted)
            shutil.rmtree(unwanted, ignore_errors=True)
            (self.folder / f"{step}.score").unlink(missing_ok=True)
            self._scores.pop(step, None)

    def _failed(self, error: Exception) -> RunError:
        step, self._saving = self._saving, None
        return RunError(
            f"the checkpoint of step {step} could not be saved in {self.folder}: "
            f"{type(error).__name__}: {str(error) or 'no further word'}"
        )


def complete_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, ascending; ``[]`` where there is none."""
    names = [e.name for e in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if _COMPLETE.fullmatch(name))


def read_part(path: Path, name: str) -> dict[str, Any]:
    """Return the dictionary ``name`` of a checkpoint's state, with numpy arrays at its leaves.

    The folder is left as it is, so that of a running process can be read.

    Raises:
        RunError: ``path`` is no checkpoint.
    """
    path = path.absolute()
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        saved = _read_record(reader, path)["leaves"]
        wanted = {leaf: 0 for leaf in saved if leaf.startswith(name + ".")}
        arguments = ocp.args.PyTreeRestore(
            item=wanted,
            restore_args=dict.fromkeys(wanted, ocp.RestoreArgs(restore_type=np.ndarray)),
            partial_restore=True,
        )
        try:
            leaves = reader.restore(path, ocp.args.Composite(state=arguments))["state"]
        except Exception as error:
            raise RunError(f"{path} cannot be read: {error}") from error
    tree: dict[str, Any] = {}
    for leaf, value in leaves.items():
        *groups, last = leaf.split(".")[1:]
        place = tree
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = value
    return tree


def _read_record(reader: ocp.Checkpointer, path: Path) -> dict[str, Any]:
    try:
        return reader.restore(path, ocp.args.Composite(record=ocp.args.JsonRestore()))["record"]
    except Exception as error:
        raise RunError(f"{path} cannot be read as a checkpoint: {error}") from error


def _flatten(tree: Any) -> dict[str, Any]:
    """Return the leaves by path, in the order of ``jax.tree.leaves``."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in pairs}
    if len(named) != len(pairs):
        raise RunError("two leaves of the state have the same path; rename one of them")
    return named


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _described(leaf: Any) -> list[Any]:
    return [list(leaf.shape), str(leaf.dtype)]


def _shown(description: list[Any]) -> str:
    return f"{description[1]}{description[0]}"


def _size(leaf: Any) -> int:
    return math.prod(leaf.shape)


def _copied(leaf: Any) -> Any:
    """Return a copy that nothing else can change or donate, on the host where that is possible."""
    if _is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jnp.copy(leaf)
    return np.array(leaf, copy=True)  # np.asarray would alias the buffer on CPU


def _target(leaf: Any) -> Any:
    """Return what orbax is asked for: random keys are stored as their raw words."""
    if not _is_key(leaf):
        return leaf
    return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))


def _restore_argument(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray | np.generic):
        return ocp.RestoreArgs(restore_type=np.ndarray)
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype)


def _like(value: Any, leaf: Any) -> Any:
    if value is None:
        make = np.zeros if isinstance(leaf, np.ndarray) else jnp.zeros
        return make(leaf.shape, leaf.dtype)
    if _is_key(leaf):
        implementations: list[Any] = []  # traced, since key_impl takes no abstract value
        jax.eval_shape(lambda key: implementations.append(jax.random.key_impl(key)), leaf)
        return jax.random.wrap_key_data(value, impl=implementations[0])
    if value.dtype != leaf.dtype:
        raise RunError(f"{leaf.dtype} cannot be held as such; jax made {value.dtype} of it (x64?)")
    return value
