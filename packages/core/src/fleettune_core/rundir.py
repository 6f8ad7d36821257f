"""The run folder: the only place that knows its file names.

run.json     the frozen config, each value with its source
plan.json    launcher, backend, layout, batch equation, memory estimate, argv, files; reasons
env.json     versions, devices, host; secrets masked by name and by shape
logs/        one file per rank: <host>.rank<k>.log, and launcher.log
ranks/       one record per rank: stage, facts, failure. Written by that rank alone
nodes/       one record per machine, where each was started by hand
metrics.jsonl
checkpoints/step-000040/
model/
base/        the model that an adapter belongs to, where it was made from a GGUF file
report.json  assembled from the above at the end
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fleettune_core.errors import ExitCode, FtError


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run's folder. Every path of it is a property here; every write is atomic."""

    path: Path

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    @property
    def plan_json(self) -> Path:
        return self.path / "plan.json"

    @property
    def env_json(self) -> Path:
        return self.path / "env.json"

    @property
    def report_json(self) -> Path:
        return self.path / "report.json"

    @property
    def metrics_jsonl(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def launcher_log(self) -> Path:
        return self.logs / "launcher.log"

    @property
    def ranks(self) -> Path:
        return self.path / "ranks"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def base(self) -> Path:
        return self.path / "base"

    def rank_log(self, host: str, rank: int) -> Path:
        return self.logs / f"{host}.rank{rank}.log"

    def rank_record(self, rank: int) -> Path:
        return self.ranks / f"rank{rank}.json"

    @property
    def nodes(self) -> Path:
        return self.path / "nodes"

    def node_record(self, node_rank: int) -> Path:
        return self.nodes / f"node{node_rank}.json"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def create(self) -> None:
        """Make the folder for a new run. One that exists and holds anything is refused: it may be another run's."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if any(self.path.iterdir()):
                raise self._in_use()
            for folder in (self.logs, self.ranks):
                folder.mkdir()
        except OSError as error:
            raise self._not_writable(error) from error

    def create_or_join(self, node_rank: int) -> bool:
        """Make the folder for a run whose machines are started by hand, or join it where another machine made it.

        The machines may share a disk or not, and nobody knows which of them comes first. True: this machine writes the
        files of the whole run (it is node 0, or it sees no other). A folder of anything else, and a node rank that is
        already in it, are refused.
        """
        record = self.node_record(node_rank)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if any(self.path.iterdir()) and not self.nodes.is_dir():
                raise self._in_use()
            for folder in (self.nodes, self.logs, self.ranks):
                folder.mkdir(exist_ok=True)
            with record.open("x", encoding="utf-8") as file:
                json.dump({"node_rank": node_rank, "host": socket.gethostname(), "pid": os.getpid()}, file)
        except FileExistsError as error:
            if not record.exists():
                raise self._not_writable(error) from error
            raise FtError(
                f"the run folder {self.path} already has a node {node_rank}",
                hint="give every machine its own --node-rank, and every new run its own --run-dir",
            ) from None
        except OSError as error:
            raise self._not_writable(error) from error
        return node_rank == 0 or not self.run_json.exists()

    def withdraw(self, node_rank: int | None = None) -> None:
        """Take back `create`, or `create_or_join(node_rank)`, after a launch that was refused: it can be typed again.

        Only what this run made is removed: `create` began with an empty folder. A folder that other machines have
        joined stays, without this one's record.
        """
        if node_rank is not None:
            self.node_record(node_rank).unlink(missing_ok=True)
            if any(self.nodes.iterdir()):
                return
        shutil.rmtree(self.path, ignore_errors=True)

    def _in_use(self) -> FtError:
        return FtError(
            f"the run folder {self.path} exists and is not empty",
            hint="give another one with --run-dir DIR, or leave --run-dir out for a new folder under runs/",
        )

    def _not_writable(self, error: OSError) -> FtError:
        return FtError(
            f"cannot create the run folder {self.path}: {error.strerror}",
            hint="give a folder that you may write to with --run-dir DIR",
        )

    def write_json(self, path: Path, value: Any) -> None:
        """Write a JSON file of this folder: beside its place, synced, renamed."""
        write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False, default=_plain) + "\n")

    def read_json(self, path: Path) -> Any:
        """A JSON file of this folder; `FtError` when it is missing or broken."""
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise FtError(f"{self.path} is not a run folder: it holds no {path.name}") from None
        except json.JSONDecodeError as error:
            raise FtError(f"{path}:{error.lineno}: broken JSON: {error.msg}") from None

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """Steps so far, in order. A line that is still being written is passed over."""
        try:
            with self.metrics_jsonl.open(encoding="utf-8") as lines:
                for line in lines:
                    if line.endswith("\n"):
                        yield json.loads(line)
        except FileNotFoundError:
            return

    def read_ranks(self) -> list[dict[str, Any]]:
        """The records of all ranks that wrote one, by rank."""
        if not self.ranks.is_dir():
            return []
        records = [json.loads(path.read_text(encoding="utf-8")) for path in self.ranks.glob("rank*.json")]
        return sorted(records, key=lambda record: int(record["rank"]))


def open_run(path: str | os.PathLike[str]) -> RunDir:
    """An existing run's folder; `FtError` when there is none."""
    folder = RunDir(Path(path))
    if not folder.run_json.is_file():
        raise FtError(f"{path} is not a run folder: it holds no run.json", exit_code=ExitCode.USAGE)
    return folder


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old one or the new one, never a part."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(cast("Mapping[str, Any]", value))
    if isinstance(value, (Path,)):
        return str(value)
    raise TypeError(f"{type(value).__name__} does not belong into a run folder")
