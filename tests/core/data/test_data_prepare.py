"""Data before and at the start of a run: a fast look, tokenised once, cached by content."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleettune_core.config.schema import Data
from fleettune_core.data import prepare as prepare_module
from fleettune_core.data.peek import peek
from fleettune_core.data.prepare import PreparedData, digest_of, lengths_of, prepare, rows_for_evaluation
from fleettune_core.data.preview import preview
from fleettune_core.data.store import build_once
from fleettune_core.errors import ExitCode, FtError
from tiny_model import make_tokenizer

SHARED = Path(__file__).parents[4] / "shared" / "data"


def rows_file(path: Path, count: int = 40, **more: Any) -> Path:
    rows = [
        {"prompt": f"what is {index}? ", "completion": f"it is {index}" + "!" * (index % 7), **more}
        for index in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def run(data: Data, tokenizer: Any, cache: Path, log: list[str] | None = None, seed: int = 1) -> PreparedData:
    lines = log if log is not None else []
    return prepare(data, seed=seed, tokenizer=tokenizer, cache_dir=cache, log=lines.append)


# The look before a run


def test_a_look_at_a_small_file_is_complete(tmp_path: Path) -> None:
    summary = peek(Data(dataset=str(rows_file(tmp_path / "x.jsonl"))))
    assert (summary.format, summary.rows, summary.complete) == ("prompt-completion", 40, True)
    assert summary.files == (str(tmp_path / "x.jsonl"),)


def test_a_look_at_a_large_file_stops_and_says_so(tmp_path: Path) -> None:
    summary = peek(Data(dataset=str(rows_file(tmp_path / "x.jsonl"))), limit_bytes=1000)
    assert (summary.format, summary.rows, summary.complete) == ("prompt-completion", None, False)
    assert "of the first" in summary.reason


def test_a_first_row_beyond_the_limit_is_no_mistake(tmp_path: Path) -> None:
    summary = peek(Data(dataset=str(rows_file(tmp_path / "x.jsonl"))), limit_bytes=10)
    assert (summary.format, summary.complete) == ("unknown until loaded", False)


def test_max_rows_ends_the_look(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "x.jsonl", 10)
    path.write_text(path.read_text() + "broken\n")
    summary = peek(Data(dataset=str(path), max_rows=10))
    assert (summary.rows, summary.complete) == (10, True)
    with pytest.raises(FtError, match=r"x\.jsonl:11: broken JSON"):
        peek(Data(dataset=str(path)))


def test_a_bad_row_is_found_before_the_run(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    with pytest.raises(FtError, match=r"x\.jsonl:1: messages has no turn of the assistant"):
        peek(Data(dataset=str(path)))


def test_rows_to_evaluate_on_are_looked_at_too(tmp_path: Path) -> None:
    train = rows_file(tmp_path / "x.jsonl")
    with pytest.raises(FtError, match="no such data file"):
        peek(Data(dataset=str(train), eval_dataset=str(tmp_path / "y.jsonl")))
    with pytest.raises(FtError, match="both say what to evaluate on"):
        peek(Data(dataset=str(train), eval_dataset=str(train), eval_split=0.1))


@pytest.mark.parametrize("dataset", ["org/name", "parquet"])
def test_what_control_cannot_read_waits_for_the_run(dataset: str, tmp_path: Path) -> None:
    if dataset == "parquet":
        (tmp_path / "x.parquet").write_bytes(b"PAR1" + bytes(16) + b"PAR1")
        dataset = str(tmp_path)
    summary = peek(Data(dataset=dataset))
    assert (summary.format, summary.rows, summary.complete) == ("unknown until loaded", None, False)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "does not begin with PAR1"),
        (b"PK__" + bytes(16) + b"PAR1", "does not begin with PAR1"),
        (b"PAR1" + bytes(16), "does not end with PAR1"),
        (b"PAR1", "does not end with PAR1"),
    ],
)
def test_a_parquet_file_without_its_two_ends_is_refused_at_once(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(content)
    with pytest.raises(FtError, match=f"x.parquet: broken parquet file: it {said}"):
        peek(Data(dataset=str(tmp_path)))


def test_a_look_at_a_megabyte_is_quick(tmp_path: Path) -> None:
    rows = [{"instruction": f"Say {index}.", "input": "", "output": "word " * 150} for index in range(1300)]
    path = tmp_path / "x.json"
    path.write_text(json.dumps(rows, indent=2))
    assert path.stat().st_size > 1_000_000
    seconds: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        peek(Data(dataset=str(path)))
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.060


# Preparing


def test_rows_are_tokenised_with_plain_columns(tmp_path: Path, tokenizer: Any) -> None:
    log: list[str] = []
    prepared = run(Data(dataset=str(rows_file(tmp_path / "x.jsonl"))), tokenizer, tmp_path / "cache", log)
    assert prepared.eval is None
    assert {name: str(feature) for name, feature in prepared.train.features.items()} == {
        "input_ids": "List(Value('int32'))",
        "labels": "List(Value('int32'))",
        "length": "Value('int32')",
        "row": "Value('int64')",
    }
    assert prepared.train["row"][:] == list(range(40))
    assert lengths_of(prepared.train).tolist() == [len(ids) for ids in prepared.train["input_ids"]]
    assert tokenizer.decode(prepared.train[3]["input_ids"]) == "what is 3? it is 3!!!<|im_end|>"
    supervised = [label for label in prepared.train[3]["labels"] if label != -100]
    assert tokenizer.decode(supervised) == " it is 3!!!<|im_end|>"
    report = prepared.report
    assert (report.rows, report.kept, report.truncated, report.dropped) == (40, 40, 0, 0)
    assert report.tokens == lengths_of(prepared.train).sum()
    assert report.supervised_tokens == sum(label != -100 for labels in prepared.train["labels"] for label in labels)
    assert (report.format, report.from_cache) == ("prompt-completion", False)
    assert any("prompt-completion" in line for line in log)


def test_odd_nested_rows_never_become_columns(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "x.jsonl"
    odd: list[Any] = [1, "a", {"b": [None, {"c": 1}]}, None]
    path.write_text("".join(json.dumps({"text": "the cat", "meta": meta}) + "\n" for meta in odd))
    assert len(run(Data(dataset=str(path)), tokenizer, tmp_path / "cache").train) == 4


def test_the_same_content_is_tokenised_once(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(Data(dataset=str(rows_file(tmp_path / "x.jsonl"))), tokenizer, tmp_path / "cache")

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(prepare_module, "tokenize", never)
    second = run(Data(dataset=str(rows_file(tmp_path / "copy.jsonl"))), tokenizer, tmp_path / "cache")
    assert (first.report.from_cache, second.report.from_cache) == (False, True)
    assert first.report.digest == second.report.digest
    assert second.train[:] == first.train[:]


def test_all_that_changes_tokens_changes_the_cache(tmp_path: Path, tokenizer: Any) -> None:
    path, other = str(rows_file(tmp_path / "x.jsonl")), str(rows_file(tmp_path / "y.jsonl", 41))
    templated = make_tokenizer()
    templated.chat_template = "{{ messages }}"
    cases = [
        run(Data(dataset=path), tokenizer, tmp_path / "cache"),
        run(Data(dataset=other), tokenizer, tmp_path / "cache"),
        run(Data(dataset=path, max_length=20), tokenizer, tmp_path / "cache"),
        run(Data(dataset=path, train_on="all"), tokenizer, tmp_path / "cache"),
        run(Data(dataset=path, max_rows=7), tokenizer, tmp_path / "cache"),
        run(Data(dataset=path, format="prompt-completion"), tokenizer, tmp_path / "cache"),
        run(Data(dataset=path), templated, tmp_path / "cache"),
    ]
    assert len({case.report.digest for case in cases}) == len(cases)
    assert not any(case.report.from_cache for case in cases)
    assert len(cases[4].train) == 7


def test_padding_left_in_a_tokenizer_does_not_change_its_name() -> None:
    tokenizer = make_tokenizer()
    before = digest_of(tokenizer)
    tokenizer(["a", "the cat sat"], padding=True, truncation=True, max_length=2)
    assert digest_of(tokenizer) == before
    tokenizer.add_tokens(["<new>"])
    assert digest_of(tokenizer) != before


def test_cut_and_dropped_rows_are_counted(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "x.jsonl"
    texts = [("a", "b"), ("the cat " * 30, "b"), ("a", "the cat " * 30)]
    path.write_text("".join(json.dumps({"prompt": prompt, "completion": end}) + "\n" for prompt, end in texts))
    prepared = run(Data(dataset=str(path), max_length=16), tokenizer, tmp_path / "cache")
    assert (prepared.report.rows, prepared.report.kept) == (3, 2)
    assert (prepared.report.truncated, prepared.report.dropped) == (1, 1)
    assert prepared.train["row"][:] == [0, 2]


def test_rows_that_all_lose_their_completion_are_an_error_and_leave_nothing(tmp_path: Path, tokenizer: Any) -> None:
    path = str(rows_file(tmp_path / "x.jsonl"))
    with pytest.raises(FtError, match="none of 40 rows keeps a supervised token within 3 tokens") as caught:
        run(Data(dataset=path, max_length=3), tokenizer, tmp_path / "cache")
    assert caught.value.exit_code is ExitCode.CONFIG
    assert [item.name for item in (tmp_path / "cache").iterdir() if item.is_dir()] == []


def test_a_mistake_in_the_last_row_leaves_nothing(tmp_path: Path, tokenizer: Any) -> None:
    path = rows_file(tmp_path / "x.jsonl")
    path.write_text(path.read_text() + '{"prompt": "a"}\n')
    with pytest.raises(FtError, match=r"x\.jsonl:41: the row has no column 'completion'"):
        run(Data(dataset=str(path)), tokenizer, tmp_path / "cache")
    assert [item.name for item in (tmp_path / "cache").iterdir() if item.is_dir()] == []


def test_a_hub_id_that_is_not_there_is_one_clear_line(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(FtError, match="no-such-org/nothing: no such file, and the hub does not give it") as caught:
        run(Data(dataset="no-such-org/nothing"), tokenizer, tmp_path / "cache")
    assert caught.value.exit_code is ExitCode.CONFIG


def test_hub_rows_go_the_same_way(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[tuple[str, str | None, str]] = []

    def load_dataset(spec: str, config: str | None, *, split: str) -> Any:
        asked.append((spec, config, split))
        return datasets.Dataset.from_dict({"text": [f"{split} {index}" for index in range(5)]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *_: ["train", "test"])
    data = Data(dataset="org/name", dataset_config="en", eval_dataset="org/name", max_rows=3)
    prepared = run(data, tokenizer, tmp_path / "cache")
    assert asked == [("org/name", "en", "train"), ("org/name", "en", "test")]
    assert tokenizer.decode(prepared.train[2]["input_ids"]) == "train 2<|im_end|>"
    assert tokenizer.decode(prepared.eval[0]["input_ids"]) == "test 0<|im_end|>"
    assert len(prepared.train) == 3


# Rows for evaluation


@pytest.mark.parametrize(("split", "count"), [(0.25, 10), (0.001, 1), (1, 1), (7, 7)])
def test_a_share_or_a_count_is_kept_for_evaluation(split: float, count: int, tmp_path: Path, tokenizer: Any) -> None:
    data = Data(dataset=str(rows_file(tmp_path / "x.jsonl")), eval_split=split)
    prepared = run(data, tokenizer, tmp_path / "cache")
    train, kept = prepared.train["row"][:], prepared.eval["row"][:]
    assert len(kept) == count
    assert sorted([*train, *kept]) == list(range(40))
    again = run(data, tokenizer, tmp_path / "cache")
    assert again.report.from_cache
    assert again.eval["row"][:] == kept


def test_another_seed_keeps_other_rows_and_longer_data_moves_few() -> None:
    rows = np.arange(1000)
    first, other = rows_for_evaluation(rows, 0.1, 1), rows_for_evaluation(rows, 0.1, 2)
    assert (first & other).sum() < 40
    longer = rows_for_evaluation(np.arange(1100), 110, 1)
    assert (first & longer[:1000]).sum() > 90


def test_a_split_that_leaves_no_rows_is_an_error() -> None:
    with pytest.raises(FtError, match="none is left to train on"):
        rows_for_evaluation(np.arange(10), 10, 1)


def test_evaluation_rows_may_have_a_file_of_their_own(tmp_path: Path, tokenizer: Any) -> None:
    train, other = rows_file(tmp_path / "x.jsonl"), rows_file(tmp_path / "y.jsonl", 5)
    prepared = run(Data(dataset=str(train), eval_dataset=str(other)), tokenizer, tmp_path / "cache")
    assert (len(prepared.train), len(prepared.eval)) == (40, 5)
    assert prepared.eval_report is not None
    assert prepared.eval_report.rows == 5


# The store


def build_slowly(folder: str, marks: str) -> None:
    def build(beside: Path) -> None:
        with Path(marks).open("a") as file:
            file.write("built\n")
        time.sleep(0.5)
        (beside / "content").write_text("whole")

    build_once(Path(folder), build, log=print)
    assert (Path(folder) / "content").read_text() == "whole"


def test_of_many_processes_one_builds_and_the_others_wait(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=build_slowly, args=(str(tmp_path / "cache" / "x"), str(tmp_path / "marks")))
        for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert (tmp_path / "marks").read_text() == "built\n"


def test_who_waits_says_so_and_takes_what_the_other_built(tmp_path: Path) -> None:
    log: list[str] = []
    found: dict[str, bool] = {}
    builds: list[Path] = []
    building, release = threading.Event(), threading.Event()

    def build(beside: Path) -> None:
        builds.append(beside)
        building.set()
        assert release.wait(30)

    def call(name: str) -> None:
        found[name] = build_once(tmp_path / "x", build, log=log.append)

    threads = [threading.Thread(target=call, args=(name,)) for name in ("first", "second")]
    threads[0].start()
    assert building.wait(30)
    threads[1].start()
    deadline = time.monotonic() + 30
    while not log and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)  # for a second one that did not really wait
    release.set()
    for thread in threads:
        thread.join()
    assert ["waiting for another process" in line for line in log] == [True]
    assert len(builds) == 1
    assert found == {"first": False, "second": True}


def test_what_was_built_is_renamed_so_that_nobody_sees_a_part(tmp_path: Path) -> None:
    inodes: list[int] = []

    def build(beside: Path) -> None:
        assert not (tmp_path / "x").exists()
        inodes.append(beside.stat().st_ino)

    build_once(tmp_path / "x", build, log=print)
    assert inodes == [(tmp_path / "x").stat().st_ino]


def test_a_builder_that_fails_or_died_leaves_no_half_folder(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    (tmp_path / ".x.dead").mkdir()

    def fails(beside: Path) -> None:
        (beside / "part").write_text("half")
        raise RuntimeError("no space left")

    with pytest.raises(RuntimeError):
        build_once(folder, fails, log=print)
    assert [item.name for item in tmp_path.iterdir() if item.is_dir()] == []
    assert build_once(folder, Path.exists, log=print) is False
    assert build_once(folder, fails, log=print) is True


# The preview


def test_a_preview_marks_what_is_supervised(tmp_path: Path, tokenizer: Any) -> None:
    data = Data(dataset=str(rows_file(tmp_path / "x.jsonl")))
    shown = preview(data, tokenizer, count=2)
    assert (shown.format, shown.note, len(shown.examples)) == ("prompt-completion", None, 2)
    example = shown.examples[1]
    assert [(segment.text, segment.supervised) for segment in example.segments] == [
        ("what is 1? ", False),
        ("it is 1!", True),
        ("<|im_end|>", True),
    ]
    assert example.where == f"{tmp_path / 'x.jsonl'}:2"
    prepared = run(data, tokenizer, tmp_path / "cache")
    assert example.num_tokens == prepared.train[1]["length"]
    assert example.supervised_tokens == sum(label != -100 for label in prepared.train[1]["labels"])


def test_a_preview_of_a_conversation_is_the_templates_text(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "x.jsonl"
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    path.write_text(json.dumps({"messages": turns}) + "\n")
    [example] = preview(Data(dataset=str(path)), tokenizer).examples
    whole = tokenizer.apply_chat_template(turns, tokenize=False)
    assert "".join(segment.text for segment in example.segments) == whole
    assert [segment.text for segment in example.segments if segment.supervised] == ["ho<|im_end|>"]


def test_a_preview_without_a_model_says_so(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"instruction": "a", "input": "b", "output": "c"}\n')
    shown = preview(Data(dataset=str(path)))
    assert shown.note is not None
    [example] = shown.examples
    assert [segment.text for segment in example.segments if segment.supervised] == ["c\n"]


# Real data sets


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real data sets beside the checkout (../shared/data) are absent")
@pytest.mark.parametrize(
    ("name", "rows", "format", "says"),
    [
        ("alpaca_en_demo.json", 999, "alpaca", ""),
        ("kto_en_demo.json", 300, "messages", ""),
        ("dpo_en_demo.json", 0, "", "preference pairs"),
        ("glaive_toolcall_en_demo.json", 0, "", "ShareGPT"),
    ],
)
def test_real_data_sets_are_read_or_refused_with_advice(name: str, rows: int, format: str, says: str) -> None:
    data = Data(dataset=str(SHARED / name))
    if says:
        with pytest.raises(FtError, match=says):
            peek(data)
    else:
        summary = peek(data)
        assert (summary.rows, summary.format) == (rows, format)
