"""Checkpoints that are complete or absent: written beside their place, synced, renamed, marked with a manifest.

step-000040/
  manifest.json    every other file with its size and SHA-256; a folder without it is no checkpoint
  position.json    step, epoch, global batch, steps per epoch, seed, learning-rate schedule
  model/           an ordinary model (or adapter) folder
  optimizer/       by parameter name, torch.distributed.checkpoint
  rng/             one file per rank
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from fleettune_core.errors import ExitCode, FtError
from fleettune_core.plugins.relay import Relay
from fleettune_core.rundir import RunDir, write_atomically
from fleettune_core.training.agreement import gather
from fleettune_core.types import TrainingContext, WrappedModel

MANIFEST = "manifest.json"


class CheckpointWriter:
    """Writes the checkpoints and the result of one run. Every method is collective."""

    def __init__(self, *, run_dir: RunDir, relay: Relay, context: TrainingContext, keep: int | None) -> None:
        self._run_dir = run_dir
        self._relay = relay
        self._context = context
        self._keep = keep
        self._rank = context.process.rank

    def save_checkpoint(
        self, *, step: int, wrapped: WrappedModel, model: Any, tokenizer: Any, position: dict[str, Any]
    ) -> Path:
        """Write `step-<step>`; returns its folder. `model` is the unwrapped one."""
        place = self._run_dir.checkpoint(step)
        partial = place.with_name(f".{place.name}.partial")

        def save_state() -> None:
            self._relay.call("save_state", context=self._context, wrapped=wrapped, folder=partial / "optimizer")

        def save_position() -> None:
            write_atomically(partial / "position.json", json.dumps(position, indent=2) + "\n")

        self._on_rank_0(lambda: _fresh(partial, ("model", "optimizer", "rng")), place)
        self._write_model(partial / "model", wrapped, model, tokenizer, place)
        self._together(save_state, place, collective=True)
        self._together(lambda: torch.save(_rng_state(), partial / "rng" / f"rank{self._rank}.pt"), place)
        self._on_rank_0(save_position, place)
        self._on_rank_0(lambda: _complete(partial, place), place)
        self._on_rank_0(lambda: rotate(self._run_dir, self._keep), place)
        return place

    def save_result(self, *, wrapped: WrappedModel, model: Any, tokenizer: Any) -> Path:
        """Write the run's `model/`: a folder that transformers or peft load without Fleettune."""
        place = self._run_dir.model
        partial = place.with_name(f".{place.name}.partial")
        self._on_rank_0(lambda: _fresh(partial, ()), place)
        self._write_model(partial, wrapped, model, tokenizer, place)
        self._on_rank_0(lambda: _settle(partial, place), place)
        return place

    def _write_model(self, folder: Path, wrapped: WrappedModel, model: Any, tokenizer: Any, place: Path) -> None:
        weights = None
        if self._relay.has("iterate_weights"):
            named = self._relay.call("iterate_weights", context=self._context, wrapped=wrapped)
            if named is not None:
                # Every rank walks through the iterator, because getting a full tensor is collective.
                weights = {name: tensor for name, tensor in named if self._rank == 0}

        def save() -> None:
            model.save_pretrained(folder, state_dict=weights)
            tokenizer.save_pretrained(folder)

        self._on_rank_0(save, place)

    def _on_rank_0(self, act: Callable[[], None], place: Path) -> None:
        self._together(act if self._rank == 0 else lambda: None, place)

    def _together(self, act: Callable[[], None], place: Path, *, collective: bool = False) -> None:
        """Do something on every rank; if it fails on one, all learn of it and none waits for ever.

        `collective`: the ranks communicate inside `act`. Then only torch.distributed.checkpoint's own exception is
        held back, which reaches every rank; after any other one this rank must go, because its partners wait in there.
        """
        told = CheckpointException if collective else (Exception, CheckpointException)
        failure: str | None = None
        try:
            act()
        # Each library has its own way to say that a disk is full: OSError, SafetensorError, RuntimeError of torch.save,
        # and CheckpointException, which is no Exception.
        except told as error:
            traceback.print_exc()
            failure = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
        failures = [f"rank {rank}: {words}" for rank, words in enumerate(gather(failure)) if words]
        if failures:
            raise FtError(
                f"cannot write {place}",
                problems=failures,
                hint="older checkpoints are untouched; free space or mend the permissions, and start again",
                exit_code=ExitCode.TRAINING,
            )


def complete_checkpoints(run_dir: RunDir) -> list[Path]:
    """Folders of complete checkpoints, oldest first. Complete: they hold a manifest, which is written last."""
    return sorted(path.parent for path in run_dir.checkpoints.glob(f"step-*/{MANIFEST}"))


def rotate(run_dir: RunDir, keep: int | None) -> None:
    """Delete the oldest complete checkpoints beyond `keep`; at least one is always left."""
    if keep is None:
        return
    for folder in complete_checkpoints(run_dir)[: -max(keep, 1)]:
        # Out of sight first: a deletion that is cut short must not leave half a checkpoint under its name.
        doomed = folder.with_name(f".{folder.name}.deleted")
        folder.rename(doomed)
        shutil.rmtree(doomed)


def broken_files(folder: Path) -> list[str]:
    """Files of a checkpoint that differ from its manifest, as `name: why`; empty for a whole one."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        return [f"{MANIFEST}: {error}"]
    problems: list[str] = []
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name}: missing")
        elif path.stat().st_size != entry["bytes"]:
            problems.append(f"{name}: {path.stat().st_size} bytes instead of {entry['bytes']}")
        elif _digest(path) != entry["sha256"]:
            problems.append(f"{name}: its content has changed")
    return problems


def _fresh(folder: Path, parts: tuple[str, ...]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for part in parts:
        (folder / part).mkdir()


def _complete(partial: Path, place: Path) -> None:
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    entries = {
        str(path.relative_to(partial)): {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in files
    }
    write_atomically(partial / MANIFEST, json.dumps({"files": entries}, indent=2) + "\n")
    _settle(partial, place)


def _settle(partial: Path, place: Path) -> None:
    for path in [*partial.rglob("*"), partial]:
        _sync(path)
    # A group that was started again reaches the same step once more.
    if place.exists():
        old = place.with_name(f".{place.name}.deleted")
        shutil.rmtree(old, ignore_errors=True)
        place.rename(old)
        partial.rename(place)
        shutil.rmtree(old)
    else:
        partial.rename(place)
    _sync(place.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _rng_state() -> dict[str, Any]:
    import random

    import numpy as np

    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state
