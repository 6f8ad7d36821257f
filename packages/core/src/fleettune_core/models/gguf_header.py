"""The header of a GGUF file: its metadata and the shapes of its tensors, without its weights.

Layout (little-endian, version 2 and 3): magic `GGUF`, version u32, tensor count u64, metadata count u64; then
metadata as (key, type u32, value) and tensors as (name, dimensions u32, each u64, type u32, offset u64). A string is
its length as u64 and its UTF-8 bytes; an array is its element type u32, its length u64 and its elements. Source: the
GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Standard library only.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from fleettune_core.errors import FtError

Scalar = int | float | bool | str

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING = 8
_ARRAY = 9
_SCALARS: Mapping[int, struct.Struct] = MappingProxyType(
    {
        0: struct.Struct("<B"),
        1: struct.Struct("<b"),
        2: struct.Struct("<H"),
        3: struct.Struct("<h"),
        4: _U32,
        5: struct.Struct("<i"),
        6: struct.Struct("<f"),
        7: struct.Struct("<?"),
        10: _U64,
        11: struct.Struct("<q"),
        12: struct.Struct("<d"),
    }
)
"""Value types by number: u8, i8, u16, i16, u32, i32, f32, bool, u64, i64, f64."""
_ALIGNMENT = 32
"""Tensor data begins at a multiple of this, unless `general.alignment` says another number."""
_BLOCKS: Mapping[int, tuple[int, int]] = MappingProxyType(
    {
        0: (1, 4),  # F32
        1: (1, 2),  # F16
        2: (32, 18),  # Q4_0
        3: (32, 20),  # Q4_1
        6: (32, 22),  # Q5_0
        7: (32, 24),  # Q5_1
        8: (32, 34),  # Q8_0
        9: (32, 40),  # Q8_1
        10: (256, 84),  # Q2_K
        11: (256, 110),  # Q3_K
        12: (256, 144),  # Q4_K
        13: (256, 176),  # Q5_K
        14: (256, 210),  # Q6_K
        15: (256, 292),  # Q8_K
        24: (1, 1),  # I8
        25: (1, 2),  # I16
        26: (1, 4),  # I32
        27: (1, 8),  # I64
        28: (1, 8),  # F64
        30: (1, 2),  # BF16
    }
)
"""(weights, bytes) of one block by tensor type. Source: `GGML_QUANT_SIZES` in gguf-py, `gguf/constants.py`."""
_SHORT_ARRAY = 1024
"""Arrays of numbers up to this length are kept: some hold one number per layer (`head_count_kv`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """What a GGUF file says about itself."""

    metadata: Mapping[str, Scalar]
    """Single values by key: `general.architecture`, `llama.block_count`, …"""
    arrays: Mapping[str, tuple[Scalar, ...]]
    """Short arrays of numbers by key; long ones and arrays of strings are only counted."""
    lengths: Mapping[str, int]
    """Length of every array by key."""
    tensors: Mapping[str, tuple[int, ...]]
    """Dimensions of every tensor, the fastest-varying first (a linear layer: in, out)."""
    least_bytes: int
    """Size that the file must have to hold its tensors; one of an unknown type counts up to its beginning."""

    @property
    def num_tokens(self) -> int | None:
        """Size of the tokenizer's vocabulary, where the file brings a tokenizer."""
        return self.lengths.get("tokenizer.ggml.tokens")

    @property
    def num_parameters(self) -> int:
        """Weights in the file. Rotary factors (`rope_freqs`, `rope_factors_…`) are constants and do not count."""
        return sum(math.prod(shape) for name, shape in self.tensors.items() if not name.startswith("rope_"))


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of `path`; `FtError` when it is no GGUF file of version 2 or 3, or is cut off.

    Strings of token arrays are stepped over and never made: 100 000 of them take a few milliseconds.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header()
    except OSError as error:
        raise FtError(f"cannot read {path}: {error.strerror}") from error
    except (struct.error, IndexError) as error:
        raise FtError(f"{path}: the GGUF header is broken or cut off", hint="download the file again") from error
    except ValueError as error:
        raise FtError(f"{path}: {error}") from error


def check_gguf_whole(path: Path) -> None:
    """`FtError` when the header of `path` is broken, or the file ends before its last tensor does."""
    header, size = read_gguf_header(path), path.stat().st_size
    if size < header.least_bytes:
        raise FtError(
            f"{path} is cut short: it has {size} bytes, and its tensors need {header.least_bytes}",
            hint="download the file again",
        )


class _Reader:
    """A cursor over the mapped file. Raises ValueError for what is no GGUF, `struct.error` at the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def header(self) -> GgufHeader:
        if self._data[:4] != b"GGUF":
            raise ValueError("not a GGUF file (it does not begin with GGUF)")
        self._at = 4
        version = self._number(_U32)
        if version not in (2, 3):
            raise ValueError(f"GGUF version {version} is not supported (2 and 3 are; big-endian files are not)")
        num_tensors, num_keys = self._number(_U64), self._number(_U64)
        metadata: dict[str, Scalar] = {}
        arrays: dict[str, tuple[Scalar, ...]] = {}
        lengths: dict[str, int] = {}
        for _ in range(num_keys):
            key, kind = self._string(), self._number(_U32)
            if kind == _ARRAY:
                lengths[key], values = self._array()
                if values is not None:
                    arrays[key] = values
            else:
                metadata[key] = self._string() if kind == _STRING else self._scalar(kind)
        tensors: dict[str, tuple[int, ...]] = {}
        data_bytes = 0
        for _ in range(num_tensors):
            name = self._string()
            dimensions = self._number(_U32)
            tensors[name] = tuple(self._number(_U64) for _ in range(dimensions))
            kind, offset = self._number(_U32), self._number(_U64)
            block, block_bytes = _BLOCKS.get(kind, (1, 0))
            data_bytes = max(data_bytes, offset + math.prod(tensors[name]) // block * block_bytes)
        if self._at > len(self._data):
            raise IndexError(self._at)
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        data_start = -(-self._at // alignment) * alignment
        return GgufHeader(
            least_bytes=data_start + data_bytes if data_bytes else self._at,
            metadata=MappingProxyType(metadata),
            arrays=MappingProxyType(arrays),
            lengths=MappingProxyType(lengths),
            tensors=MappingProxyType(tensors),
        )

    def _number(self, form: struct.Struct) -> int:
        (value,) = form.unpack_from(self._data, self._at)
        self._at += form.size
        return value

    def _scalar(self, kind: int) -> Scalar:
        form = _SCALARS.get(kind)
        if form is None:
            raise ValueError(f"unknown GGUF value type {kind}")
        return self._number(form)

    def _string(self) -> str:
        length = self._number(_U64)
        start, self._at = self._at, self._at + length
        if self._at > len(self._data):
            raise IndexError(self._at)
        return self._data[start : self._at].decode("utf-8", "replace")

    def _array(self) -> tuple[int, tuple[Scalar, ...] | None]:
        kind, length = self._number(_U32), self._number(_U64)
        if kind == _STRING:
            self._skip_strings(length)
            return length, None
        if kind == _ARRAY:
            for _ in range(length):
                self._array()
            return length, None
        form = _SCALARS.get(kind)
        if form is None:
            raise ValueError(f"unknown GGUF value type {kind}")
        if length > _SHORT_ARRAY:
            self._at += length * form.size
            return length, None
        return length, tuple(self._number(form) for _ in range(length))

    def _skip_strings(self, count: int) -> None:
        # A tight loop over locals: it runs once per token and merge of the vocabulary.
        at, data, unpack = self._at, self._data, _U64.unpack_from
        for _ in range(count):
            at += 8 + unpack(data, at)[0]
        self._at = at
