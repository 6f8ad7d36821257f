"""`ft data preview`: what a run would read, and where it is read."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from fleettune_cli.main import cli
from fleettune_cli.render_preview import first_lines, marked
from fleettune_core.data import preview_main
from fleettune_core.data.preview import PreviewExample, Segment
from fleettune_core.errors import ExitCode, FtError


def ft(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words), prog_name="ft")


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": f"{number} + 1?"}, {"role": "assistant", "content": str(number + 1)}]}
        for number in range(3)
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_preview_without_a_model_marks_what_the_assistant_says(chat: Path) -> None:
    result = ft("data", "preview", str(chat), "--count", "2")
    assert result.exit_code == 0, result.output
    assert result.stdout == (
        "format: messages (all 3 rows have messages)\n"
        "the supervised part is between [[ and ]]\n"
        "note: no model given: shown without its chat template and tokens\n"
        f"\n{chat}:1\nuser: 0 + 1?\nassistant: [[1]]\n"
        f"\n{chat}:2\nuser: 1 + 1?\nassistant: [[2]]\n"
    )


def test_a_preview_takes_its_data_from_the_option_too(chat: Path) -> None:
    assert ft("data", "preview", "--dataset", str(chat)).stdout == ft("data", "preview", str(chat)).stdout


@pytest.mark.parametrize(
    ("model", "said"),
    [("no/such-model", "asking the hub for the tokenizer of no/such-model …\n"), ("local", "")],
)
def test_a_preview_that_asks_the_hub_says_so_and_waits_seconds(
    chat: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str, said: str
) -> None:
    started: list[Mapping[str, str]] = []

    def run(_command: list[str], *, env: Mapping[str, str], **_: Any) -> SimpleNamespace:
        started.append(env)
        answer = {"format": "messages", "reason": "all", "examples": [], "note": None}
        return SimpleNamespace(stdout=json.dumps(answer), stderr="", returncode=0)

    if model == "local":
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "config.json").write_text("{}")
        model = str(tmp_path / "m")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("fleettune_cli.commands.data.subprocess.run", run)
    result = ft("data", "preview", str(chat), "--model", model)
    assert result.stderr == said
    assert float(started[0]["HF_HUB_ETAG_TIMEOUT"]) <= 10


def test_a_preview_asks_the_hub_once_for_all_of_a_tokenizer(
    chat: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class LocalEntryNotFoundError(OSError):
        pass

    asked: list[str] = []

    def snapshot_download(name: str, **_: Any) -> str:
        asked.append(f"all of {name}")
        raise LocalEntryNotFoundError("no network")

    def from_pretrained(name: str, **_: Any) -> None:
        asked.append(name)
        raise LocalEntryNotFoundError("no network")

    def explain_load_error(error: OSError, **_: Any) -> FtError:
        return FtError(str(error))

    loading = SimpleNamespace(explain_load_error=explain_load_error, load_tokenizer=None, materialise=None)
    monkeypatch.setitem(sys.modules, "fleettune_core.models.load", loading)
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    transformers = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=from_pretrained))
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    data, model = json.dumps({"dataset": str(chat)}), json.dumps({"model": "no/such-model"})
    assert preview_main.main(["--data", data, "--model", model]) == ExitCode.CONFIG
    assert asked == ["all of no/such-model"]
    assert json.loads(capsys.readouterr().out)["error"]["message"] == "no network"


def test_a_preview_of_a_wrong_format_is_the_datas_mistake(chat: Path) -> None:
    result = ft("data", "preview", str(chat), "--data_format", "text")
    assert result.exit_code == ExitCode.CONFIG
    assert f"{chat}:1" in result.stderr


def test_a_preview_of_a_file_that_is_not_there_says_so() -> None:
    result = ft("data", "preview", "no-such.jsonl")
    assert result.exit_code == ExitCode.CONFIG
    assert result.stderr.startswith("error: no such data file: no-such.jsonl\nhint: ")


def write_parquet(path: Path, columns: dict[str, list[str]]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path)
    return path


def test_parquet_is_read_by_a_process_of_its_own(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "rows.parquet", {"text": ["one", "two"]})
    result = ft("data", "preview", str(path), "--json")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert shown["format"] == "text"
    assert shown["examples"][0]["segments"] == [{"text": "one", "supervised": True}]


def test_a_mistake_in_that_process_reads_like_one_here(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "rows.parquet", {"nothing": ["one"]})
    result = ft("data", "preview", str(path))
    assert result.exit_code == ExitCode.CONFIG
    assert result.stderr.startswith(f"error: {path} row 1: the rows have none of the four shapes")
    assert "Traceback" not in result.stderr


EXAMPLE = PreviewExample(
    where="x.jsonl:1",
    segments=(Segment(text="user: a\n", supervised=False), Segment(text="b\nc\n", supervised=True)),
)


def test_the_supervised_part_is_bracketed_without_colour_and_coloured_with_it() -> None:
    assert marked(EXAMPLE, plain=True) == "user: a\n[[b\nc]]\n"
    coloured = marked(EXAMPLE, plain=False)
    assert "[[" not in coloured
    assert "\x1b[32m" in coloured
    assert click.unstyle(coloured) == "user: a\nb\nc\n"


def test_a_long_example_says_how_much_is_left_out() -> None:
    long = dataclasses.replace(EXAMPLE, segments=(Segment(text="line\n" * 30, supervised=False),))
    shown = first_lines(long, plain=True, num_lines=12)
    assert len(shown) == 13
    assert shown[-1] == "… 18 more lines; `ft data preview` shows all"
