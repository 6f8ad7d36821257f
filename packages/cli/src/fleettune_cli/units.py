"""Numbers for readers: bytes, counts, durations."""

from __future__ import annotations

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(count: float) -> str:
    """`1536` → `1.5 KiB`: binary units, three significant digits at most."""
    value, unit = float(count), _BYTE_UNITS[0]
    for unit in _BYTE_UNITS:
        if abs(value) < 1024 or unit == _BYTE_UNITS[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 100 else f"{value:.1f} {unit}"


def format_count(count: int) -> str:
    """`134515008` → `134.5 M`."""
    for limit, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if abs(count) >= limit:
            value = count / limit
            return f"{value:.1f} {unit}" if abs(value) >= 100 else f"{value:.2f} {unit}"
    return str(count)


def format_seconds(seconds: float) -> str:
    """`3725` → `1 h 02 min`, `95` → `1 min 35 s`, `7.25` → `7.2 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def format_rate(per_second: float) -> str:
    """`352.81` → `353`, `3.217` → `3.22`, with thousands separated."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def format_value(value: object) -> str:
    """A setting's value as a run file would spell it."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
