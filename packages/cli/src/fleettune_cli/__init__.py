"""The `ft` command. Importing this package is cheap; each command's module is imported when it runs."""

from __future__ import annotations

__version__ = "0.1.0"
