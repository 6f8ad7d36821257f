"""Values that must not be shown: told by the name of their key, or by their own shape."""

from __future__ import annotations

import re
import reprlib
from typing import Any

MASK = "***"
_SECRET_WORDS = frozenset({"token", "secret", "password", "passwd", "credential", "credentials", "apikey"})
_SECRET_PAIRS = ("api_key", "access_key", "private_key", "auth_key")
_SECRET_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}|eyJ[\w-]{10,}\.[\w-]{10,})"
    r"|://[^/\s:@]+:[^/\s@]+@"
)


def is_secret(key: str, value: Any = None) -> bool:
    """Whether the last name of a dotted `key` sounds like a secret, or `value` looks like one."""
    name = key.rsplit(".", 1)[-1].replace("-", "_").lower()
    if _SECRET_WORDS & set(name.split("_")) or any(pair in name for pair in _SECRET_PAIRS):
        return True
    return bool(_SECRET_SHAPES.search(str(value))) if isinstance(value, (str, bytes)) else False


def shown(key: str, value: Any) -> str:
    """`value` as an error may show it: its `repr`, shortened, or a mask for a secret."""
    if is_secret(key, value):
        return MASK
    text = reprlib.Repr()
    text.maxstring = text.maxother = 80
    written = text.repr(value)
    return MASK if _SECRET_SHAPES.search(written) else written
