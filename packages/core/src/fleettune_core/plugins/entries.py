"""One installed plugin: its kind, its name, and the distribution that it comes from. Nothing of it is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from fleettune_core.plugins.trouble import Trouble, TroubleKind

CORE_DISTRIBUTION = "fleettune-core"


class PluginKind(str, Enum):
    """The kinds of plugin; the values are the entry-point groups."""

    LAUNCHER = "fleettune.launchers"
    BACKEND = "fleettune.backends"
    EXTENSION = "fleettune.extensions"

    @property
    def label(self) -> str:
        """`launcher`, `backend` or `extension`."""
        return self.name.lower()


OPTIONAL: Mapping[tuple[PluginKind, str], str] = MappingProxyType(
    {
        (PluginKind.LAUNCHER, "torchrun"): "fleettune-launcher-torchrun",
        (PluginKind.LAUNCHER, "slurm"): "fleettune-launcher-slurm",
        (PluginKind.BACKEND, "fsdp"): "fleettune-backend-fsdp",
        (PluginKind.BACKEND, "deepspeed"): "fleettune-backend-deepspeed",
    }
)
"""This project's plugins that are distributions of their own, and which: for whoever asks for one that is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginEntry:
    """One installed plugin, as its distribution's metadata names it. Nothing of it is imported."""

    name: str
    """What users type."""
    kind: PluginKind
    distribution: str
    version: str
    value: str
    """Where the object is: `package.module:Name`."""
    builtin: bool

    @property
    def source(self) -> str:
        """`fleettune-core 0.1.0`."""
        return f"{self.distribution} {self.version}"

    @property
    def title(self) -> str:
        """`launcher local`."""
        return f"{self.kind.label} {self.name}"

    def trouble(self, kind: TroubleKind, message: str, hint: str | None = None) -> Trouble:
        """A record about this plugin."""
        return Trouble(kind=kind, plugin=self.title, distribution=self.source, message=message, hint=hint)
