"""How a run ended: what it reached and where the model is, or one block about what failed first."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from fleettune_cli import terminal
from fleettune_cli.units import format_bytes, format_rate, format_seconds
from fleettune_core.report import Report, model_of
from fleettune_core.rundir import RunDir

LABEL_COLUMNS = 15
STATUS_COLOURS: Mapping[str, str] = {"done": "green", "failed": "red", "interrupted": "yellow"}
NUM_RANKS_SHOWN = 8


def print_report(report: Report, run_dir: RunDir, stream: IO[str], *, lora: bool) -> None:
    """Print the report of a run that has ended. On failure its block is the last thing on the terminal."""
    head = terminal.styled(report.status, stream, fg=STATUS_COLOURS.get(report.status, "white"), bold=True)
    stream.write(f"{head}: {report.run_id}\n")
    for line in summary_lines(report, run_dir, terminal.columns(), lora=lora):
        stream.write(line + "\n")
    if report.first_failure is not None and report.status != "done":
        stream.write("\n")
        for line in failure_lines(report, run_dir):
            style = {"fg": "red", "bold": True} if line.startswith("error:") else {}
            stream.write((terminal.styled(line, stream, **style) if style else line) + "\n")
    stream.flush()


def summary_lines(report: Report, run_dir: RunDir, width: int, *, lora: bool) -> Iterator[str]:
    """What the run reached, in aligned lines of at most `width` columns."""
    totals = report.totals
    losses = [line["loss"] for line in run_dir.read_metrics() if "loss" in line and "eval_loss" not in line]
    evaluations = [line["eval_loss"] for line in run_dir.read_metrics() if "eval_loss" in line]
    rows: list[tuple[str, str]] = [("folder", str(run_dir.path))]
    if totals.steps:
        rows.append(("steps", f"{totals.steps}, {totals.rows:,} rows, {totals.tokens:,} tokens"))
        rows.append(("loss", f"{_loss(losses[0])} → {_loss(losses[-1])}" if losses else "not recorded"))
    if evaluations:
        rows.append(("eval loss", f"{_loss(evaluations[0])} → {_loss(evaluations[-1])}"))
    if totals.tokens_per_second is not None:
        rows.append(("speed", f"{format_rate(totals.tokens_per_second)} tokens/s"))
    if report.seconds_to_first_step is not None:
        rows.append(("first step", f"after {format_seconds(report.seconds_to_first_step)}"))
    if totals.peak_memory_bytes is not None:
        rows.append(("memory", f"{format_bytes(totals.peak_memory_bytes)} at the peak of the rank that used most"))
    rows += [("ranks" if not index else "", text) for index, text in enumerate(_world(report))]
    if (model := model_of(report, run_dir)) is not None:
        rows.append(("what next", next_line(model, lora=lora)))
    elif report.status == "done":
        rows.append(("model", "in the run folder of machine 0, which this machine does not share"))
    for label, text in rows:
        # What can be copied stays in one piece.
        if label in ("folder", "what next"):
            yield f"  {label}".ljust(LABEL_COLUMNS) + text
        else:
            yield from _hanging(label, text, width)


def failure_lines(report: Report, run_dir: RunDir) -> Iterator[str]:
    """The block about what failed first: who, where, why, its last words, where the logs are, what to do."""
    failure = report.first_failure
    assert failure is not None
    if failure.rank is None:
        yield f"error: {failure.cause}"
    else:
        where = f" on {failure.host}" if failure.host else ""
        yield f"error: rank {failure.rank}{where} failed first: {failure.cause}"
    for problem in failure.problems:
        yield f"  {problem}"
    if report.last_lines:
        yield f"last lines of {report.log}:"
        yield from (f"  | {line}" for line in report.last_lines)
    yield f"logs: {run_dir.logs}"
    if failure.hint:
        yield f"hint: {failure.hint}"


def next_line(model: Path, *, lora: bool) -> str:
    """One line of Python that loads the result."""
    folder = str(model)
    if lora:
        return f"from peft import AutoPeftModelForCausalLM as M; model = M.from_pretrained({folder!r})"
    return f"from transformers import AutoModelForCausalLM as M; model = M.from_pretrained({folder!r})"


def _world(report: Report) -> Iterator[str]:
    """One line per rank while they are few, one per host when they are many."""
    members = report.world
    if len(members) <= NUM_RANKS_SHOWN:
        for member in members:
            wrapper = member.wrapper or "no model yet"
            sharding = f", {member.sharding}" if member.sharding not in (None, "none") else ""
            stage = "" if member.stage == "done" else f" ({member.stage})"
            yield f"{member.rank} on {member.host}: {wrapper}{sharding}{stage}"
        return
    for host in dict.fromkeys(member.host for member in members):
        here = [member for member in members if member.host == host]
        kinds = ", ".join(dict.fromkeys(member.wrapper or "no model yet" for member in here))
        yield f"{here[0].rank} to {here[-1].rank} ({len(here)}) on {host}: {kinds}"


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _hanging(label: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width=width,
        initial_indent=f"  {label}".ljust(LABEL_COLUMNS),
        subsequent_indent=" " * LABEL_COLUMNS,
        break_long_words=False,
        break_on_hyphens=False,
    )
