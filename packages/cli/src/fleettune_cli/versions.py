"""Versions of Fleettune's own distributions, read from their metadata."""

from __future__ import annotations

from importlib import metadata

OWN = ("fleettune-core", "fleettune-cli", "fleettune-launcher-torchrun", "fleettune-launcher-slurm")


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def own_versions() -> dict[str, str]:
    """Fleettune's installed distributions and their versions. They are released in lockstep."""
    found = {name: version_of(name) for name in OWN}
    return {name: version for name, version in found.items() if version is not None}
