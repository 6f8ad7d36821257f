"""A checkpoint is complete or absent, also when it is written again, rotated, or cannot be written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleettune_core.errors import ExitCode, FtError
from fleettune_core.rundir import RunDir
from fleettune_core.training.checkpoints import CheckpointWriter, broken_files, complete_checkpoints, rotate


class Saveable:
    """A model or tokenizer, as far as a checkpoint sees it."""

    def __init__(self, name: str, content: str = "weights", error: BaseException | None = None) -> None:
        self.name = name
        self.content = content
        self.error = error

    def save_pretrained(self, folder: Path, state_dict: Any = None) -> None:
        if self.error is not None:
            raise self.error
        folder.mkdir(exist_ok=True)
        (folder / self.name).write_text(self.content)


class QuietRelay:
    """A backend that has nothing of its own to save, or fails to."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def has(self, hook_name: str) -> bool:
        return False

    def call(self, hook_name: str, **arguments: Any) -> None:
        if self.error is not None:
            raise self.error
        (arguments["folder"] / "state").write_text("moments")


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    return run_dir


def writer(run_dir: RunDir, *, keep: int | None = None, error: BaseException | None = None) -> CheckpointWriter:
    context: Any = SimpleNamespace(process=SimpleNamespace(rank=0))
    relay: Any = QuietRelay(error)
    return CheckpointWriter(run_dir=run_dir, relay=relay, context=context, keep=keep)


def save(target: CheckpointWriter, step: int, model: Saveable | None = None) -> Path:
    wrapped: Any = None
    return target.save_checkpoint(
        step=step,
        wrapped=wrapped,
        model=model or Saveable("model.safetensors"),
        tokenizer=Saveable("tokenizer.json"),
        position={"step": step},
    )


def test_a_checkpoint_holds_what_its_manifest_says(run_dir):
    place = save(writer(run_dir), 5)
    names = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())
    assert names == [
        "manifest.json",
        "model/model.safetensors",
        "model/tokenizer.json",
        "optimizer/state",
        "position.json",
        "rng/rank0.pt",
    ]
    assert broken_files(place) == []
    (place / "model" / "model.safetensors").write_text("WEIGHTS")
    assert broken_files(place) == ["model/model.safetensors: its content has changed"]


def test_the_same_step_of_a_restarted_group_replaces_the_old_one(run_dir):
    save(writer(run_dir), 5)
    place = save(writer(run_dir), 5, Saveable("model.safetensors", "newer"))
    assert (place / "model" / "model.safetensors").read_text() == "newer"
    assert [path.name for path in run_dir.checkpoints.iterdir()] == ["step-000005"]


def test_the_newest_are_kept(run_dir):
    target = writer(run_dir, keep=2)
    for step in (5, 10, 15):
        save(target, step)
    assert [path.name for path in complete_checkpoints(run_dir)] == ["step-000010", "step-000015"]
    assert len(list(run_dir.checkpoints.iterdir())) == 2


def test_an_unfinished_one_is_no_checkpoint_and_is_not_counted(run_dir):
    save(writer(run_dir), 5)
    (run_dir.checkpoint(10) / "model").mkdir(parents=True)
    rotate(run_dir, 1)
    assert [path.name for path in complete_checkpoints(run_dir)] == ["step-000005"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device"), "rank 0: No space left on device"),
        (RuntimeError("unexpected pos 64 vs 0"), "rank 0: RuntimeError: unexpected pos 64 vs 0"),
    ],
)
def test_one_that_cannot_be_written_is_told_and_leaves_the_older_ones(run_dir, error, words):
    save(writer(run_dir), 5)
    with pytest.raises(FtError) as caught:
        save(writer(run_dir), 10, Saveable("model.safetensors", error=error))
    assert caught.value.exit_code == ExitCode.TRAINING
    assert list(caught.value.problems) == [words]
    assert [path.name for path in complete_checkpoints(run_dir)] == ["step-000005"]


def test_what_torch_says_of_a_full_disk_is_told_too(run_dir):
    from torch.distributed.checkpoint.api import CheckpointException

    full = CheckpointException("write failed", {0: (OSError(28, "No space left on device"), None)})
    with pytest.raises(FtError, match="cannot write"):
        save(writer(run_dir, error=full), 5)


def test_a_backend_that_fails_inside_a_collective_is_not_held_back(run_dir):
    with pytest.raises(ZeroDivisionError):
        save(writer(run_dir, error=ZeroDivisionError()), 5)
