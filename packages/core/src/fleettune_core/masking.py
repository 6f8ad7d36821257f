"""Secrets never reach a file, a log or a screen: told by the name of their key, or by their own shape."""

from __future__ import annotations

import re
import reprlib
from typing import Any

MASK = "***"

_SECRET_NAME = re.compile(
    r"(?:^|_)(?:[A-Z]*TOKEN|[A-Z]*SECRET|PASS|PASSWD|[A-Z]*PASSWORD|PASSPHRASE|[A-Z]*KEY|CREDENTIALS?|AUTH|COOKIE)(?:_|$)"
)
_SPECIAL_TOKEN = re.compile(r"(?:^|_)(?:PAD|EOS|BOS|UNK|SEP|CLS|MASK)_TOKEN$")
"""A tokenizer's own tokens, which keep nothing secret."""
_TOKEN = re.compile(
    r"""
    \bhf_[A-Za-z0-9]{8,}                                   # Hugging Face
    | \bsk-[A-Za-z0-9_-]{12,}                              # OpenAI and others
    | \bgh[pousr]_[A-Za-z0-9]{16,} | \bgithub_pat_\w{16,}  # GitHub
    | \bglpat-[\w-]{16,}                                   # GitLab
    | \bxox[abeoprs]-[\w-]{10,}                            # Slack
    | \bA(?:KIA|SIA)[0-9A-Z]{16}\b                         # AWS
    | \beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?               # JSON web token
    | (?<=://)[^/\s@]+@                                    # user:password@ of a URL
    """,
    re.VERBOSE,
)
_LONG_HEXADECIMAL = re.compile(r"(?<![0-9A-Za-z])[0-9a-fA-F]{32,}(?![0-9A-Za-z])")
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_LONG_WORD = re.compile(r"(?<![\w/+.=-])[A-Za-z0-9+/_-]{40,}={0,2}(?![\w/+.-])")


def mask_tokens(text: str) -> str:
    """`text` with the tokens of common services, JSON web tokens and the user part of URLs replaced by `***`."""
    return _TOKEN.sub(lambda match: f"{MASK}@" if match[0].endswith("@") else MASK, text)


def mask(text: str) -> str:
    """As `mask_tokens`, and whatever else may be a secret: long hexadecimal numbers, and words of 40 characters or
    more that mix capitals, small letters and digits (base64). File paths and UUIDs stay.

    For text of unknown origin (an environment). It also hides a commit's hash, so it is not for a run's own settings.
    """
    return _LONG_WORD.sub(_mask_long_word, _LONG_HEXADECIMAL.sub(MASK, mask_tokens(text)))


def mask_value(name: str, value: str) -> str:
    """A variable's value as it may be shown: a mask for a secret's name, else `mask` of it."""
    return MASK if value and _names_a_secret(name) else mask(value)


def is_secret(key: str, value: Any = None) -> bool:
    """Whether the last name of a dotted `key` sounds like a secret, or `value` holds a token."""
    holds_token = isinstance(value, (str, bytes)) and bool(_TOKEN.search(str(value)))
    return holds_token or _names_a_secret(key.rsplit(".", 1)[-1])


def shown(key: str, value: Any) -> str:
    """`value` as an error may show it: its `repr`, shortened, or a mask for a secret."""
    if is_secret(key, value):
        return MASK
    text = reprlib.Repr()
    text.maxstring = text.maxother = 80
    return mask_tokens(text.repr(value))


def _names_a_secret(name: str) -> bool:
    upper = name.replace("-", "_").upper()
    return bool(_SECRET_NAME.search(upper)) and not _SPECIAL_TOKEN.search(upper)


def _mask_long_word(match: re.Match[str]) -> str:
    word = match[0]
    mixed = any(c.isupper() for c in word) and any(c.islower() for c in word) and any(c.isdigit() for c in word)
    return MASK if mixed and not word.startswith("/") and not _UUID.search(word) else word
