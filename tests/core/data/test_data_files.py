"""Finding data files and reading their rows: every mistake names its file and line."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fleettune_core.data.files import Row, find_files, iter_all_rows, iter_rows
from fleettune_core.errors import ExitCode, FtError


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(path: Path, *, limit_bytes: int | None = None) -> list[tuple[int, dict[str, object]]]:
    return [(row.line, row.values) for row in iter_rows(path, limit_bytes=limit_bytes)]


def error_of(path: Path) -> FtError:
    with pytest.raises(FtError) as caught:
        list(iter_rows(path))
    assert caught.value.exit_code is ExitCode.CONFIG
    return caught.value


# Finding


@pytest.mark.parametrize("spec", ["", " "])
def test_an_empty_name_is_not_the_current_folder(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "rows.jsonl", "{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FtError, match="the name of the data is empty"):
        find_files(spec)


def test_a_file_is_found_as_it_is(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", "{}")
    assert find_files(str(file)) == [file]


def test_a_folder_is_searched_to_the_bottom_and_sorted(tmp_path: Path) -> None:
    wanted = [write(tmp_path / name, "{}") for name in ("a.json", "b/c.parquet", "b/d.jsonl.gz", "z.csv")]
    for name in ("notes.txt", ".cache/x.json", ".hidden.json", "b/dataset_info.json"):
        write(tmp_path / name, "{}")
    assert find_files(str(tmp_path)) == wanted


def test_a_glob_takes_data_files_only_and_sorts_them(tmp_path: Path) -> None:
    wanted = [write(tmp_path / name, "{}") for name in ("a1.json", "a2.jsonl")]
    write(tmp_path / "a3.txt", "")
    assert find_files(str(tmp_path / "a*")) == wanted


@pytest.mark.parametrize("spec", ["org/name", "squad", "org/data-v1.5", "org/wiki.en", "HuggingFaceH4/ultrachat_200k"])
def test_what_can_only_be_a_hub_id_is_left_to_the_hub(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_files(spec) is None


@pytest.mark.parametrize(
    "spec", ["./data", "/no/such/place", "rows.json", "data/rows.jso", "a/b/c", "data/", "x.txt", "~/no"]
)
def test_what_looks_like_a_path_must_exist(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FtError, match="no such data file") as caught:
        find_files(spec)
    assert caught.value.exit_code is ExitCode.CONFIG
    assert spec in caught.value.message


def test_a_mistyped_file_names_its_nearest_neighbour(tmp_path: Path) -> None:
    write(tmp_path / "alpaca.json", "[]")
    with pytest.raises(FtError, match=r"did you mean .*alpaca\.json\?"):
        find_files(str(tmp_path / "alpca.json"))


def test_a_mistyped_folder_names_its_nearest_neighbour(tmp_path: Path) -> None:
    write(tmp_path / "datasets" / "alpaca.json", "[]")
    with pytest.raises(FtError, match=r"there is no folder .*datsets \(did you mean datasets\?\)"):
        find_files(str(tmp_path / "datsets" / "alpaca.json"))


def test_an_empty_folder_is_told_with_what_it_holds(tmp_path: Path) -> None:
    write(tmp_path / "notes.txt", "")
    with pytest.raises(FtError, match="holds no data file") as caught:
        find_files(str(tmp_path))
    assert caught.value.hint == "it holds notes.txt"


def test_a_glob_without_a_match_is_told(tmp_path: Path) -> None:
    write(tmp_path / "notes.txt", "")
    with pytest.raises(FtError, match="it matches 1 of other kinds"):
        find_files(str(tmp_path / "*"))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FtError, match="not a data file"):
        find_files(str(write(tmp_path / "rows.txt", "hello")))


# Reading


def test_json_lines_know_their_lines_and_blank_ones_are_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", '{"a": 1}\n\n{"a": "\u2028"}\r\n')
    assert read(path) == [(1, {"a": 1}), (3, {"a": "\u2028"})]


def test_elements_of_a_json_array_know_their_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "x.json", '[\n  {"a": 1}, {"a": 2},\n\n  {\n    "a": 3\n  }\n]\n')
    assert read(path) == [(2, {"a": 1}), (2, {"a": 2}), (4, {"a": 3})]


def test_objects_one_after_the_other_are_read_from_a_json_file_too(tmp_path: Path) -> None:
    path = write(tmp_path / "x.json", '{"a": 1}\n{"a": 2}\n{"a": 3}\n')
    assert read(path) == [(1, {"a": 1}), (2, {"a": 2}), (3, {"a": 3})]


def test_a_csv_record_over_several_lines_is_named_by_its_first(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", 'text,n\n"one\ntwo",1\n\nthree,2\n')
    assert read(path) == [(2, {"text": "one\ntwo", "n": "1"}), (5, {"text": "three", "n": "2"})]


def test_a_csv_field_may_be_longer_than_the_parsers_default(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "text\n" + "a" * 200_000 + "\n")
    assert len(read(path)[0][1]["text"]) == 200_000  # type: ignore[arg-type]


def test_parquet_rows_are_numbered(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    turns = [{"role": "user", "content": "a"}]
    pq.write_table(pa.table({"messages": [turns, turns]}), tmp_path / "x.parquet")
    rows = list(iter_rows(tmp_path / "x.parquet"))
    assert [row.values for row in rows] == [{"messages": turns}] * 2
    assert rows[1].where == f"{tmp_path / 'x.parquet'} row 2"


@pytest.mark.parametrize(
    ("name", "content"), [("x.jsonl.gz", '{"a": 1}\n'), ("x.json.gz", '[{"a": 1}]'), ("x.csv.gz", "a\n1\n")]
)
def test_gzipped_files_are_read(name: str, content: str, tmp_path: Path) -> None:
    [(_, values)] = read(write(tmp_path / name, gzip.compress(content.encode())))
    assert str(values["a"]) == "1"


@pytest.mark.parametrize(
    ("name", "content"), [("x.jsonl", '{"a": 1}\n'), ("x.json", '[{"a": 1}]'), ("x.csv", "a\n1\n")]
)
def test_a_byte_order_mark_is_passed_over(name: str, content: str, tmp_path: Path) -> None:
    [(_, values)] = read(write(tmp_path / name, b"\xef\xbb\xbf" + content.encode()))
    assert list(values) == ["a"]


@pytest.mark.parametrize(
    ("name", "content", "line", "says"),
    [
        ("x.jsonl", '{"a": 1}\n{"a": \n', 2, "broken JSON"),
        ("x.jsonl", '{"a": 1}\n[1, 2]\n', 2, r"must be an object with named columns, not \[1, 2\]"),
        ("x.jsonl", '[{"a": 1}]\n', 1, "a JSON array, where .jsonl needs one object a line"),
        ("x.jsonl", '{"a": 1}\n\n"text"\n', 3, "must be an object"),
        ("x.jsonl", b'{"a": 1}\n{"a": "\xe9"}\n', 2, "not UTF-8: byte 0xe9"),
        ("x.json", '[\n{"a": 1},\n{"a": oops}\n]', 3, "broken JSON"),
        ("x.json", '[\n{"a": 1}\n{"a": 2}\n]', 3, "expected , or ]"),
        ("x.json", '[\n{"a": 1},\n]', 3, "broken JSON"),
        ("x.json", '[\n{"a": 1}\n', 3, "the array is not closed by ]"),
        ("x.json", '[{"a": 1}]\n[]', 2, "more text after the end"),
        ("x.json", '[\n{"a": 1},\n7]', 3, "must be an object with named columns, not 7"),
        ("x.json", '\n"text"', 2, "expected an array of objects"),
        ("x.json", b'[\n{"a": "\xff"}]', 2, "not UTF-8: byte 0xff"),
        ("x.json", "[" + "[" * 200_000, 1, "broken JSON"),
        ("x.csv", "a,b\n1,2\n1\n", 3, "1 fields, but the header has 2: a, b"),
        ("x.csv", "a,b\n1,2,3\n", 2, "3 fields, but the header has 2"),
        ("x.csv", "a,a\n1,2\n", 1, "names 'a' more than once"),
        ("x.csv", 'a\n"open\n', 2, "broken CSV"),
        ("x.csv", b"a\nok\n\xe9\n", 3, "not UTF-8: byte 0xe9"),
    ],
)
def test_a_mistake_in_a_file_names_file_and_line(
    name: str, content: str | bytes, line: int, says: str, tmp_path: Path
) -> None:
    path = write(tmp_path / name, content)
    assert error_of(path).message.startswith(f"{path}:{line}: ")
    with pytest.raises(FtError, match=says):
        list(iter_rows(path))


def test_rows_before_a_broken_line_are_given_first(tmp_path: Path) -> None:
    rows = iter_rows(write(tmp_path / "x.jsonl", '{"a": 1}\n{"a"\n'))
    assert next(rows).values == {"a": 1}
    with pytest.raises(FtError):
        next(rows)


def test_one_object_in_a_json_file_is_told_what_was_expected(tmp_path: Path) -> None:
    error = error_of(write(tmp_path / "x.json", '{"data": [{"a": 1}]}'))
    assert "one JSON object, expected an array of objects" in error.message
    assert error.hint is not None
    assert "'data'" in error.hint


@pytest.mark.parametrize(
    ("name", "content"), [("x.jsonl", ""), ("x.jsonl", "\n\n"), ("x.json", "[]"), ("x.json", " "), ("x.csv", "a,b\n")]
)
def test_a_file_without_rows_is_an_error(name: str, content: str, tmp_path: Path) -> None:
    assert "no rows" in error_of(write(tmp_path / name, content)).message


def test_a_broken_gzip_file_is_an_error_and_no_traceback(tmp_path: Path) -> None:
    assert "broken gzip" in error_of(write(tmp_path / "x.jsonl.gz", b"not gzip at all")).message
    whole = gzip.compress(b'{"a": 1}\n' * 1000)
    assert "broken gzip" in error_of(write(tmp_path / "y.jsonl.gz", whole[: len(whole) // 2])).message


def test_a_broken_parquet_file_is_an_error_and_no_traceback(tmp_path: Path) -> None:
    assert "broken parquet" in error_of(write(tmp_path / "x.parquet", b"PAR1 not really")).message


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv"])
def test_a_limit_gives_whole_rows_of_the_beginning_only(ending: str, tmp_path: Path) -> None:
    values = [{"text": f"row {index}\nof many"} for index in range(100)]
    if ending == "csv":
        content = "text\n" + "".join(f'"{value["text"]}"\n' for value in values)
    elif ending == "json":
        content = json.dumps(values, indent=1)
    else:
        content = "".join(json.dumps(value) + "\n" for value in values)
    path = write(tmp_path / f"x.{ending}", content)
    for limit_bytes in range(1, 400, 7):
        found = [row for _, row in read(path, limit_bytes=limit_bytes)]
        assert found == values[: len(found)]
    assert 0 < len(read(path, limit_bytes=400)) < 100
    assert len(read(path, limit_bytes=10**6)) == 100


def test_rows_of_several_files_come_in_order_and_may_be_limited(tmp_path: Path) -> None:
    files = [write(tmp_path / name, '{"a": 1}\n{"a": 2}\n') for name in ("a.jsonl", "b.jsonl")]
    rows: list[Row] = list(iter_all_rows(files, max_rows=3))
    assert [row.where for row in rows] == [f"{files[0]}:1", f"{files[0]}:2", f"{files[1]}:1"]


def test_looking_at_data_imports_nothing_heavy() -> None:
    code = (
        "import sys, fleettune_core.data.peek, fleettune_core.data.preview;"
        "print(sorted({'numpy', 'pyarrow', 'datasets', 'torch', 'transformers', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
