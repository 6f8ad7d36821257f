"""Progress: reading a file that grows, and what is shown of it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fleettune_cli import terminal
from fleettune_cli.metrics_tail import MetricsTail
from fleettune_cli.progress import LiveDisplay, PlainDisplay, Progress, QuietDisplay, Snapshot, display_for, live_view


def metrics(step: int, **changes: Any) -> dict[str, Any]:
    line = {
        "step": step,
        "epoch": 0.1,
        "loss": 2.0 - step / 100,
        "grad_norm": 1.0,
        "learning_rate": 2e-4,
        "tokens": 1000,
        "samples": 8,
        "step_seconds": 2.0,
        "tokens_per_second": 500.0,
        "peak_memory_bytes": 3 * 2**30,
    }
    return {**line, **changes}


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_tail_gives_each_line_once_and_only_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == []
    with path.open("w") as file:
        file.write(json.dumps(metrics(1)) + "\n" + '{"step": 2, "lo')
        file.flush()
        assert [line["step"] for line in tail.read()] == [1]
        assert tail.read() == []
        file.write('ss": 1.5}\n')
        file.flush()
        assert tail.read() == [{"step": 2, "loss": 1.5}]


def test_the_tail_of_a_file_written_anew_starts_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(metrics(1)) + "\n" + json.dumps(metrics(2)) + "\n")
    tail = MetricsTail(path)
    assert len(tail.read()) == 2
    path.write_text(json.dumps(metrics(1)) + "\n")
    assert [line["step"] for line in tail.read()] == [1]


def test_the_tail_does_not_read_what_it_has_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(metrics(1)) + "\n")
    tail = MetricsTail(path)
    tail.read()
    offset = tail.offset
    # What lies before the offset is not looked at again, not even when it is no JSON.
    path.write_bytes(b"x" * offset + json.dumps(metrics(2)).encode() + b"\n")
    assert [line["step"] for line in tail.read()] == [2]


def test_the_run_is_where_its_slowest_rank_is() -> None:
    progress = Progress()
    assert progress.stage(["loading", "preparing", "training"]).stage == "preparing"
    assert progress.stage(["loading", "failed"]).stage == "failed"
    assert progress.stage([]).stage == "failed"


def test_time_left_follows_the_recent_steps() -> None:
    progress = Progress()
    progress.total(50)
    for step in range(1, 31):
        progress.add(metrics(step, step_seconds=100.0 if step <= 10 else 2.0))
    assert progress.snapshot.seconds_left == pytest.approx(20 * 2.0)


def test_an_evaluation_keeps_the_step_and_adds_its_loss() -> None:
    progress = Progress()
    progress.add(metrics(7))
    snapshot = progress.add({"step": 7, "epoch": 0.2, "eval_loss": 1.25})
    assert (snapshot.step, snapshot.loss, snapshot.eval_loss) == (7, 2.0 - 0.07, 1.25)


def test_plain_progress_is_one_line_per_stage_and_about_twenty_for_the_steps() -> None:
    stream = io.StringIO()
    progress = Progress()
    progress.total(100)
    with PlainDisplay(stream) as display:
        display.show(progress.stage(["preparing"]))
        display.show(progress.stage(["preparing"]))
        display.show(progress.stage(["loading"]))
        for step in range(1, 101):
            display.show(progress.add(metrics(step)))
        display.show(progress.add({"step": 100, "eval_loss": 1.5}))
        display.show(progress.stage(["done"]))
    lines = stream.getvalue().splitlines()
    assert lines[:4] == [
        "preparing data",
        "loading the model",
        "training",
        "step 1/100  loss 1.9900  500 tokens/s  lr 2.0e-04  3.0 GiB  3 min 18 s left",
    ]
    assert lines[-2:] == [
        "step 100/100  loss 1.0000  500 tokens/s  lr 2.0e-04  3.0 GiB",
        "step 100  eval loss 1.5000",
    ]
    steps = [line for line in lines if line.startswith("step ") and "eval" not in line]
    assert len(steps) == 21


def test_a_short_run_shows_every_step() -> None:
    stream = io.StringIO()
    display, progress = PlainDisplay(stream), Progress()
    progress.total(3)
    for step in range(1, 4):
        display.show(progress.add(metrics(step)))
    assert stream.getvalue().count("loss") == 3


def test_a_loss_that_is_not_finite_is_said() -> None:
    progress = Progress()
    stream = io.StringIO()
    PlainDisplay(stream).show(progress.add(metrics(1, loss=None)))
    assert "loss not finite" in stream.getvalue()


@pytest.mark.parametrize("variable", ["CI", "NO_COLOR"])
def test_ci_and_no_color_give_plain_lines_on_a_terminal(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    stream = Terminal()
    assert isinstance(display_for(stream), LiveDisplay)
    monkeypatch.setenv(variable, "1")
    assert isinstance(display_for(stream), PlainDisplay)
    assert terminal.is_plain(stream)


def test_a_file_gets_plain_lines_and_quiet_gets_nothing() -> None:
    assert isinstance(display_for(io.StringIO()), PlainDisplay)
    assert type(display_for(Terminal(), quiet=True)) is QuietDisplay


def test_the_live_view_fits_80_columns_and_shows_every_figure() -> None:
    snapshot = Snapshot(
        stage="training",
        step=12345,
        total_steps=100000,
        loss=1.23456,
        learning_rate=1.9e-4,
        tokens_per_second=123456.0,
        peak_memory_bytes=70 * 2**30,
        seconds_left=3 * 86400 + 3600,
    )
    console = Console(file=io.StringIO(), width=80)
    console.print(live_view(snapshot, 3725))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80
    for figure in ("12345/100000", "1.2346", "123,456 tokens/s", "1.9e-04", "70.0 GiB", "3 d 1 h left", "1 h 02 min"):
        assert figure in text


def test_before_the_first_step_the_live_view_shows_the_stage() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(live_view(Snapshot(stage="loading"), 5.0))
    assert "loading the model" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_live_display_leaves_its_last_picture_and_the_lines_said() -> None:
    stream = Terminal()
    progress = Progress()
    progress.total(2)
    with LiveDisplay(stream) as display:
        display.say("a line that stays")
        display.show(progress.add(metrics(2)))
    assert "a line that stays" in stream.getvalue()
    assert "2/2" in stream.getvalue()
