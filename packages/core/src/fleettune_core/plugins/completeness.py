"""Whether what a plugin's distribution requires is installed, from metadata alone: nothing is imported."""

from __future__ import annotations

import importlib.metadata
import re

from fleettune_core.plugins.entries import OPTIONAL, PluginEntry
from fleettune_core.plugins.trouble import Trouble, TroubleKind


def incomplete(entry: PluginEntry) -> Trouble | None:
    """The record for a plugin whose distribution requires others that are not there; None where all are.

    Only presence counts, no versions. Requirements that hold under a condition (an extra, a Python version) are left
    out.
    """
    missing = missing_requirements(entry.distribution)
    if not missing:
        return None
    names = [_name(requirement) for requirement in missing]
    return entry.trouble(
        TroubleKind.INCOMPLETE,
        f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not installed",
        f"pip install {' '.join(_quoted(requirement) for requirement in missing)}",
    )


def is_ours(entry: PluginEntry) -> bool:
    """Whether the plugin is this project's: then an incomplete one cannot work. Others may know better."""
    return OPTIONAL.get((entry.kind, entry.name)) == entry.distribution


def missing_requirements(distribution: str) -> tuple[str, ...]:
    """Requirements of an installed distribution, as it states them, that name nothing that is installed."""
    try:
        requirements = importlib.metadata.requires(distribution) or []
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ()
    return tuple(
        requirement.strip() for requirement in requirements if ";" not in requirement and not _is_there(requirement)
    )


def _is_there(requirement: str) -> bool:
    try:
        importlib.metadata.distribution(_name(requirement))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False
    return True


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
    return found[0] if found else requirement


def _quoted(requirement: str) -> str:
    return f"'{requirement}'" if re.search(r"[<>!~\[ ;@]", requirement) else requirement
