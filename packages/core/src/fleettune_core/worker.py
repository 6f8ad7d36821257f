"""The worker story: environment -> data -> model -> hooked trainer -> train -> save.

One process per device runs this: `python -m fleettune_core.worker RUN_DIR`. All that it needs is in `run.json`. Heavy
libraries are imported once, after the log is in place, by the steps that need them.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from fleettune_core.errors import ExitCode, FtError
from fleettune_core.masking import mask_tokens
from fleettune_core.plan.record import RunRecord, read_run_record
from fleettune_core.plugins.relay import Relay
from fleettune_core.rankrecord import RankRecord
from fleettune_core.rundir import RunDir, open_run
from fleettune_core.types import BatchPlan, ProcessInfo, current_environment


@dataclass(frozen=True, slots=True)
class Place:
    """Where this rank works and how it speaks."""

    run_dir: RunDir
    plan: RunRecord
    process: ProcessInfo
    record: RankRecord
    say: Callable[[str], None]
    """Prints one line where a person may be watching; does nothing when a launcher collects the output."""


def main(argv: list[str] | None = None) -> int:
    """Entry point of a worker process; returns its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        run_dir = open_run(arguments.run_dir)
        plan = read_run_record(run_dir.read_json(run_dir.run_json))
        process = find_process()
    except FtError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    out, console = os.fdopen(os.dup(1), "w", buffering=1), os.fdopen(os.dup(2), "w", buffering=1)

    def say(line: str) -> None:
        if arguments.console and process.rank == 0:
            print(line, file=console)

    export_process(process)
    record = RankRecord(run_dir, process)
    _redirect_output(run_dir, process)
    place = Place(run_dir, plan, process, record, say)
    code = ExitCode.OK
    try:
        _train(place)
    except BaseException as error:  # noqa: BLE001 - whatever ends a rank is recorded, also KeyboardInterrupt
        code = record.failure(error)
        if isinstance(error, FtError):
            print(f"error: {error}", file=sys.stderr)
        else:
            print(mask_tokens(traceback.format_exc()), file=sys.stderr)
        if arguments.console:
            print(f"error: rank {process.rank}: {mask_tokens(str(error))}", file=console)
    if arguments.console and process.rank == 0:
        with contextlib.suppress(OSError):
            code = _report(place, code, out, as_json=arguments.json)
    _leave_at_once(code)
    return int(code)


def _report(place: Place, code: ExitCode, out: TextIO, *, as_json: bool) -> ExitCode:
    """Write the report, since no control process does; and tell the result on `out`. Returns the run's exit code."""
    from fleettune_core.report import assemble_by_rank_0, with_places

    run_dir = place.run_dir
    report = assemble_by_rank_0(run_dir, run_id=place.plan.run_id, ranks=place.process.world_size, code=code)
    run_dir.write_json(run_dir.report_json, report.to_dict())
    if as_json:
        print(json.dumps(with_places(report, run_dir), indent=2, ensure_ascii=False), file=out)
    elif report.status == "done":
        print(run_dir.model, file=out)
    return ExitCode(report.exit_code)


def find_process() -> ProcessInfo:
    """Which rank this process is, as the strongest launcher sees it; rank 0 of 1 where none does."""
    from fleettune_core.plugins.catalog import load_catalog
    from fleettune_core.plugins.detection import strongest_process

    found = strongest_process(load_catalog(), current_environment())
    return found or ProcessInfo(rank=0, local_rank=0, world_size=1, local_world_size=1)


def export_process(process: ProcessInfo) -> None:
    """Tell torch and Accelerate which rank this is, in the variables that they read.

    torchrun has set them already; a task of srun finds them here for the first time.
    """
    if process.world_size == 1:
        return
    known = {
        "RANK": process.rank,
        "LOCAL_RANK": process.local_rank,
        "WORLD_SIZE": process.world_size,
        "LOCAL_WORLD_SIZE": process.local_world_size,
        "MASTER_ADDR": process.master_addr,
        "MASTER_PORT": process.master_port,
    }
    for name, value in known.items():
        if value is not None:
            os.environ.setdefault(name, str(value))


def _train(place: Place) -> None:
    from fleettune_core.training.story import train_run

    relay = Relay.for_worker(place.plan.backend.name)
    batch = batch_for(place.plan, place.process)
    with contextlib.ExitStack() as ending:
        train_run(
            place.run_dir, place.plan, place.process, batch, relay, place.record, place.say, at_end=ending.callback
        )


def batch_for(plan: RunRecord, process: ProcessInfo) -> BatchPlan:
    """The batch equation for the ranks that are really there.

    A fixed layout must be the planned one. An elastic one keeps its global batch and is solved anew.
    """
    if process.world_size == plan.batch.ranks:
        return plan.batch
    if not plan.layout.elastic:
        raise FtError(
            f"the plan is for {plan.batch.ranks} ranks, and {process.world_size} came up",
            hint="start the run again with ft train, which plans for what is there",
            exit_code=ExitCode.LAUNCH,
        )
    from fleettune_core.plan.batch import resolve_for_world

    return resolve_for_world(plan.batch, process.world_size)


def _redirect_output(run_dir: RunDir, process: ProcessInfo) -> None:
    """Send everything that this process prints, C libraries included, to its own log."""
    import socket

    path = run_dir.rank_log(socket.gethostname(), process.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding="utf-8", line_buffering=True)
    faulthandler.enable()


def _leave_at_once(code: ExitCode) -> None:
    # Not sys.exit. After a failure, shutting a process group down waits for ranks that wait for this one; and gloo's
    # threads can abort an interpreter that is shutting down, after all work is done (pytorch/pytorch#179291).
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(int(code))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fleettune_core.worker",
        description="Train as one rank of the run whose folder is given.",
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", help="the run folder, made by `ft train`")
    parser.add_argument(
        "--console",
        action="store_true",
        help="nobody follows this run: rank 0 tells its progress on standard error, and writes the report",
    )
    parser.add_argument("--json", action="store_true", help="with --console: print the report as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
