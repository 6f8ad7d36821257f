"""Telling the shape of rows, and reading one row: what is wrong is said with file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleettune_core.data.files import Row
from fleettune_core.data.formats import FormatDetector, convert, detect_format, plain_prompt
from fleettune_core.errors import ExitCode, FtError

USER = {"role": "user", "content": "What is two and two?"}
ASSISTANT = {"role": "assistant", "content": "Four."}


def rows(*values: dict[str, Any]) -> list[Row]:
    return [Row(values=value, file=Path("x.jsonl"), line=line) for line, value in enumerate(values, start=1)]


def error_of(*values: dict[str, Any], forced: str | None = None) -> FtError:
    with pytest.raises(FtError) as caught:
        detect_format(rows(*values), forced)
    assert caught.value.exit_code is ExitCode.CONFIG
    return caught.value


@pytest.mark.parametrize(
    ("values", "format"),
    [
        ({"messages": [USER, ASSISTANT]}, "messages"),
        ({"prompt": "a", "completion": "b"}, "prompt-completion"),
        ({"prompt": [USER], "completion": [ASSISTANT]}, "prompt-completion"),
        ({"text": "a"}, "text"),
        ({"instruction": "a", "input": "", "output": "b"}, "alpaca"),
        ({"instruction": "a", "input": None, "output": "b"}, "alpaca"),
        ({"instruction": "a", "output": "b"}, "alpaca"),
    ],
)
def test_each_shape_is_told_by_its_columns(values: dict[str, Any], format: str) -> None:
    assert detect_format(rows(values, values)).format == format


def test_the_reason_counts_rows_and_names_unused_columns() -> None:
    values = {"messages": [USER, ASSISTANT], "label": True}
    assert detect_format(rows(values, values)).reason == "all 2 rows have messages; not used: label"


def test_rows_of_two_shapes_need_a_word_of_the_user() -> None:
    both = {"instruction": "a", "output": "b", "text": "c"}
    error = error_of({"text": "a"}, both)
    assert error.message == "x.jsonl:2: a row can be read in two ways: text and alpaca"
    assert error.hint == "say which with --data-format text or --data-format alpaca"
    assert detect_format(rows({"text": "a"}, both), "text").format == "text"


def test_the_last_row_counts_as_much_as_the_first() -> None:
    values = [{"text": "a"}] * 50 + [{"txt": "b"}]
    error = error_of(*values)
    assert error.message == "x.jsonl:51: the row has no column 'text'"
    assert error.problems == ("50 of 51 rows are text",)


def test_a_null_is_named_with_its_row() -> None:
    assert error_of({"text": "a"}, {"text": None}).message == "x.jsonl:2: the row has null in column 'text', not text"


def test_rows_of_several_shapes_are_counted() -> None:
    error = error_of({"text": "a"}, {"text": "b"}, {"prompt": "c", "completion": "d"})
    assert error.message.startswith("x.jsonl:3: ")
    assert error.problems == ("2 of 3 rows are text, 1 are prompt-completion",)


def test_a_misspelt_column_is_told_its_nearest_name_and_all_shapes() -> None:
    error = error_of({"instructions": "a", "output": "b"})
    assert error.problems[0] == "columns found: instructions (did you mean instruction?), output"
    assert [problem.split(":")[0] for problem in error.problems[1:]] == [
        "messages",
        "prompt-completion",
        "text",
        "alpaca",
    ]


def test_a_column_of_the_wrong_type_is_told_so() -> None:
    error = error_of({"messages": "user: hello"})
    assert "messages: the row at x.jsonl:1 has text in column 'messages', not a list" in error.problems


def test_other_tools_shapes_get_advice() -> None:
    sharegpt = error_of({"conversations": [{"from": "human", "value": "a"}]})
    assert "ShareGPT" in (sharegpt.hint or "")
    pairs = error_of({"prompt": "a", "chosen": "b", "rejected": "c"})
    assert "preference pairs" in (pairs.hint or "")


def test_a_format_that_is_said_is_checked() -> None:
    error = error_of({"text": "a"}, forced="alpaca")
    assert error.message == "x.jsonl:1: the row has no column 'instruction', as --data-format alpaca needs"


def test_no_rows_are_no_format() -> None:
    with pytest.raises(FtError, match="no rows"):
        FormatDetector().result()


def read(format: str, **values: Any) -> Any:
    return convert(Row(values=values, file=Path("x.jsonl"), line=7), format)


def test_messages_keep_their_turns_and_lose_nulls() -> None:
    example = read("messages", messages=[{**USER, "name": None}, {**ASSISTANT, "reasoning_content": "easy"}])
    assert example.messages == (USER, {**ASSISTANT, "reasoning_content": "easy"})
    assert example.num_prompt_messages == 0
    assert example.where == "x.jsonl:7"


def test_prompt_and_completion_of_messages_become_one_conversation() -> None:
    example = read("prompt-completion", prompt=[USER, ASSISTANT, USER], completion=[ASSISTANT])
    assert example.messages == (USER, ASSISTANT, USER, ASSISTANT)
    assert example.num_prompt_messages == 3


def test_alpaca_becomes_a_conversation_and_keeps_a_plain_prompt() -> None:
    example = read("alpaca", instruction="Add.", input="2 and 2", output="4")
    assert example.messages == ({"role": "user", "content": "Add.\n\n2 and 2"}, {"role": "assistant", "content": "4"})
    assert (example.prompt, example.completion) == ("Task:\nAdd.\n\nInput:\n2 and 2\n\nAnswer:\n", "4")
    assert read("alpaca", instruction="Add.", input="", output="4").messages[0]["content"] == "Add."
    assert plain_prompt("Add.", "") == "Task:\nAdd.\n\nAnswer:\n"


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "messages is empty"),
        ([USER], "messages has no turn of the assistant"),
        ([USER, "hello"], r"messages\[1\] is text, not an object with role and content"),
        ([USER, {"content": "b"}], r"messages\[1\] has no role; it has content"),
        ([USER, {"role": "assistant"}], r"messages\[1\] has no content; it has role"),
        ([{"from": "human", "value": "a"}], r"messages\[0\] has no role; it has from, value"),
        ([USER, {"role": "assistant", "content": None}], r"messages\[1\]\.content is null, not text"),
        ([USER, {"role": "assistant", "content": [{"type": "text"}]}], r"messages\[1\]\.content is a list, not text"),
        ([USER, {"role": "gpt", "content": "b"}], r"has the role 'gpt' \(did you mean assistant\?\)"),
        ([USER, {"role": "asistant", "content": "b"}], r"has the role 'asistant' \(did you mean assistant\?\)"),
        ([USER, {"role": None, "content": "b"}], "has the role None"),
        ([USER, {**ASSISTANT, "tool_calls": [{"name": "f"}]}], "has tool_calls, which are not trained on"),
        ([USER, {"role": "assistant", "content": "\ud83d"}], r"content holds half a character: \\ud83d"),
    ],
)
def test_a_bad_conversation_is_named_by_file_line_and_turn(messages: list[Any], says: str) -> None:
    with pytest.raises(FtError, match=says) as caught:
        read("messages", messages=messages)
    assert caught.value.message.startswith("x.jsonl:7: ")
    assert caught.value.exit_code is ExitCode.CONFIG


@pytest.mark.parametrize(
    ("format", "values", "says"),
    [
        ("text", {"text": None}, "has null in column 'text'"),
        ("text", {"other": "a"}, "has no column 'text'"),
        ("text", {"text": "\udfff"}, "half a character"),
        ("prompt-completion", {"prompt": "a", "completion": [ASSISTANT]}, "prompt is text and completion is a list"),
        ("prompt-completion", {"prompt": [], "completion": [ASSISTANT]}, "prompt is empty"),
        ("prompt-completion", {"prompt": [USER], "completion": [USER]}, "completion has no turn of the assistant"),
        ("alpaca", {"instruction": "a", "output": 7}, "has a number in column 'output', not text"),
        ("alpaca", {"instruction": "a", "input": 7, "output": "b"}, "has a number in column 'input', not text"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(format: str, values: dict[str, Any], says: str) -> None:
    with pytest.raises(FtError, match=says) as caught:
        read(format, **values)
    assert caught.value.message.startswith("x.jsonl:7: ")
