"""The run's settings: declared (`fields`, `schema`), and merged from file, flags and environment (`load`)."""

from fleettune_core.config.fields import Limits, Setting, setting, settings_of

__all__ = ["Limits", "Setting", "setting", "settings_of"]
