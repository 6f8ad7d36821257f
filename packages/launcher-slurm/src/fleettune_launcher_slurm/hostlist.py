"""SLURM's short form of host names, as far as finding the first one needs it."""

from __future__ import annotations

import re

_RANGES = re.compile(r"\[([^\[\]]*)\]")


def first_host(expression: str) -> str | None:
    """The first host of `node[003-005,9],gpu7` (`node003`); None where there is none or the brackets do not close.

    Commas inside brackets separate numbers, not hosts, and leading zeros belong to the name.
    """
    first = re.match(r"\s*((?:[^\[\],\s]|\[[^\[\]]*\])+)\s*(?:,|$)", expression)
    if first is None:
        return None
    name = _RANGES.sub(lambda match: re.split(r"[-,]", match[1], maxsplit=1)[0], first[1])
    return name if re.fullmatch(r"[\w.-]+", name) else None
