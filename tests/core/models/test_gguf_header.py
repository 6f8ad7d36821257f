"""The GGUF header reader, on files written here byte by byte and on a real one."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import pytest

from fleettune_core.errors import FtError
from fleettune_core.models.gguf_header import check_gguf_whole, read_gguf_header

_FORMS = {4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q"}


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, kind: int, value: object) -> bytes:
    """One metadata entry; `kind` 9 takes (element kind, values)."""
    head = string(key) + struct.pack("<I", kind)
    return head + _value(kind, value)


def _value(kind: int, value: object) -> bytes:
    if kind == 8:
        return string(str(value))
    if kind == 9:
        inner, values = value  # type: ignore[misc]
        return struct.pack("<IQ", inner, len(values)) + b"".join(_value(inner, item) for item in values)
    return struct.pack(_FORMS[kind], value)


def tensor(name: str, *dimensions: int) -> bytes:
    sizes = b"".join(struct.pack("<Q", size) for size in dimensions)
    return string(name) + struct.pack("<I", len(dimensions)) + sizes + struct.pack("<IQ", 0, 0)


def gguf(entries: list[bytes], tensors: list[bytes], version: int = 3) -> bytes:
    counts = struct.pack("<IQQ", version, len(tensors), len(entries))
    return b"GGUF" + counts + b"".join(entries) + b"".join(tensors)


SAMPLE = gguf(
    [
        entry("general.architecture", 8, "llama"),
        entry("tokenizer.ggml.tokens", 9, (8, ["a", "bc", "", "漢字"])),
        entry("nested", 9, (9, [(4, [1, 2]), (8, ["x", "yz"])])),
        entry("many", 9, (5, list(range(2000)))),
        entry("llama.attention.head_count_kv", 9, (4, [1, 2, 1])),
        entry("llama.block_count", 4, 3),
        entry("negative", 5, -7),
        entry("flag", 7, True),
        entry("factor", 6, 0.5),
    ],
    [tensor("token_embd.weight", 8, 4), tensor("rope_freqs.weight", 99), tensor("blk.0.attn_norm.weight", 8)],
)


def test_values_after_skipped_arrays_are_read_right(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(SAMPLE)
    header = read_gguf_header(tmp_path / "m.gguf")
    assert dict(header.metadata) == {
        "general.architecture": "llama",
        "llama.block_count": 3,
        "negative": -7,
        "flag": True,
        "factor": 0.5,
    }
    assert dict(header.arrays) == {"llama.attention.head_count_kv": (1, 2, 1)}
    assert header.lengths["many"] == 2000
    assert header.num_tokens == 4
    assert header.tensors["token_embd.weight"] == (8, 4)


def test_rotary_constants_are_no_parameters(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(SAMPLE)
    assert read_gguf_header(tmp_path / "m.gguf").num_parameters == 8 * 4 + 8


@pytest.mark.parametrize("length", [5, 20, 60, 90, 150, len(SAMPLE) // 2, len(SAMPLE) - 1])
def test_a_file_that_is_cut_off_says_so(tmp_path: Path, length: int) -> None:
    (tmp_path / "m.gguf").write_bytes(SAMPLE[:length])
    with pytest.raises(FtError, match="cut off"):
        read_gguf_header(tmp_path / "m.gguf")


def test_a_lying_count_ends_at_the_end_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60))
    with pytest.raises(FtError, match="cut off"):
        read_gguf_header(tmp_path / "m.gguf")


def test_a_big_endian_or_old_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf([], [], version=1))
    with pytest.raises(FtError, match="version 1 is not supported"):
        read_gguf_header(tmp_path / "m.gguf")


def test_an_empty_file_and_another_format_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "zip.gguf").write_bytes(b"PK\x03\x04" * 20)
    for name in ("empty.gguf", "zip.gguf"):
        with pytest.raises(FtError):
            read_gguf_header(tmp_path / name)


@pytest.mark.parametrize(
    ("kind", "weights", "needed"), [(0, 10, 40), (1, 10, 20), (8, 64, 68), (3, 64, 40), (14, 256, 210), (99, 64, 0)]
)
def test_a_file_ends_where_its_last_tensor_does(tmp_path: Path, kind: int, weights: int, needed: int) -> None:
    placed = string("w") + struct.pack("<IQIQ", 1, weights, kind, 32)
    header = gguf([entry("general.alignment", 4, 64)], [placed])
    start = -(-len(header) // 64) * 64
    file = tmp_path / "m.gguf"
    file.write_bytes(header + bytes(start - len(header) + 32 + needed))
    assert read_gguf_header(file).least_bytes == start + 32 + needed
    check_gguf_whole(file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(FtError, match="is cut short"):
        check_gguf_whole(file)


def test_a_hundred_thousand_tokens_are_stepped_over_quickly(tmp_path: Path) -> None:
    tokens = [f"token{number}" for number in range(100_000)]
    (tmp_path / "m.gguf").write_bytes(gguf([entry("tokenizer.ggml.tokens", 9, (8, tokens))], []))
    times: list[float] = []
    for _ in range(5):
        started = time.process_time()
        assert read_gguf_header(tmp_path / "m.gguf").num_tokens == 100_000
        times.append(time.process_time() - started)
    assert min(times) < 0.1, times
