"""What ranks announce is shown at once, as lines that stay, and once."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleettune_cli.follow import _Follower
from fleettune_cli.progress import PlainDisplay
from fleettune_core.rankrecord import RankRecord
from fleettune_core.rundir import RunDir
from fleettune_core.types import ProcessInfo


@pytest.fixture
def run(tmp_path: Path) -> Any:
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    return SimpleNamespace(
        run_dir=run_dir, plan=SimpleNamespace(config=SimpleNamespace(train=SimpleNamespace(max_steps=5)))
    )


def record(run: Any, rank: int) -> RankRecord:
    return RankRecord(run.run_dir, ProcessInfo(rank=rank, local_rank=rank, world_size=2, local_world_size=2))


def test_what_ranks_announce_is_shown_once_in_the_order_of_time(run: Any) -> None:
    stream = io.StringIO()
    follower = _Follower(run, PlainDisplay(stream))
    first, second = record(run, 0), record(run, 1)
    second.announce("compiling something, once")
    first.announce("compiling something, once")
    follower.look(last=True)
    assert stream.getvalue() == "compiling something, once\nstarting\n"
    second.announce("compiled in 3 s")
    follower.look(last=True)
    follower.look(last=True)
    assert stream.getvalue() == "compiling something, once\nstarting\ncompiled in 3 s\n"
