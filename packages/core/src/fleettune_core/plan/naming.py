"""What a run is called, and where its folder is."""

from __future__ import annotations

import os
import re
from datetime import datetime
from pathlib import Path

from fleettune_core.errors import ExitCode, FtError
from fleettune_core.types import ProcessInfo

RUNS = Path("runs")
"""Folder of runs that nobody gave a folder, below the one where `ft` is typed."""

_LONGEST_LABEL = 60


def name_run(
    *,
    name: str | None,
    run_dir: str | None,
    model_label: str,
    method: str,
    now: datetime,
    process: ProcessInfo | None,
) -> tuple[str, Path]:
    """The run's id and its folder, absolute.

    The id is `LABEL-METHOD-YYYYmmdd-HHMMSS`, where LABEL is `name` or else the model's. Ranks that were started from
    outside must agree without talking: they use the name of their group instead of the clock, and where the launcher
    gives none, raise `FtError` that asks for `--run-dir`.
    """
    label = file_name(name or model_label.rstrip("/").rsplit("/", 1)[-1]) or "run"
    stem = f"{label}-{method}"
    if process is not None and process.world_size > 1:
        if run_dir is None and process.group is None:
            raise FtError(
                f"this is rank {process.rank} of {process.world_size}, and nothing tells the ranks a common run folder",
                hint="give all of them the same one: --run-dir runs/NAME",
                exit_code=ExitCode.USAGE,
            )
        ending = file_name(process.group or "") or "run"
    else:
        ending = now.strftime("%Y%m%d-%H%M%S")
    run_id = f"{stem}-{ending}"
    if run_dir is not None:
        return run_id, Path(run_dir).expanduser().absolute()
    if process is None:
        run_id = _unused(run_id)
    return run_id, (RUNS / run_id).absolute()


def file_name(text: str) -> str:
    """`text` as part of a file name: letters, digits, `.`, `_` and `-`, without a dot or dash at either end."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:_LONGEST_LABEL].strip("-.")


def _unused(run_id: str) -> str:
    """`run_id`, numbered where a run of the same second has its folder already."""
    candidate, number = run_id, 2
    while (RUNS / candidate).exists():
        candidate, number = f"{run_id}-{number}", number + 1
    return candidate


def check_free(run_dir: Path) -> None:
    """Refuse a folder that holds anything, because it may be another run's, and one that cannot be made.

    `RunDir.create` refuses the first again, for good.
    """
    hint = "give another one with --run-dir DIR"
    if run_dir.is_dir():
        if any(run_dir.iterdir()):
            raise FtError(
                f"the run folder {run_dir} exists and is not empty",
                hint=f"{hint}, or leave --run-dir out for a new folder under runs/",
            )
    elif run_dir.exists():
        raise FtError(f"{run_dir} is a file, and the run needs a folder", hint=hint)
    there = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
    if not there.is_dir():
        raise FtError(f"the run folder {run_dir} cannot be made: {there} is a file", hint=hint)
    if not os.access(there, os.W_OK | os.X_OK):
        raise FtError(f"the run folder {run_dir} cannot be made: {there} may not be written to", hint=hint)
