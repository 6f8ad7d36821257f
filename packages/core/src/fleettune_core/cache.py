"""Where prepared data and converted models are kept between runs.

Entries are named after the digest of their content, so the cache never changes what a run does; it only saves time. It
may be deleted whenever no run is preparing.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(environment: dict[str, str] | None = None) -> Path:
    """`FT_CACHE_DIR` (`~` is the home folder), or `fleettune` under the user's cache folder (XDG_CACHE_HOME, by default
    ~/.cache)."""
    env = os.environ if environment is None else environment
    if env.get("FT_CACHE_DIR"):
        return Path(env["FT_CACHE_DIR"]).expanduser()
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fleettune"
