"""The names that a run file may use, and what to say about one that it may not."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from fleettune_core.config.fields import Setting, settings_of
from fleettune_core.config.schema import SECTIONS, TOP_LEVEL, RunConfig
from fleettune_core.config.trl_fields import OWNED, fields_for
from fleettune_core.config.values import Target
from fleettune_core.errors import nearest

PLUGIN_SECTIONS: Mapping[str, str] = MappingProxyType({"launch": "launcher_options", "backend": "backend_options"})
"""Sections that also hold the chosen plugin's options, and the field of `RunConfig` that those go to."""

METHOD = "sft"


class UnknownNameError(Exception):
    """A name that no setting has, or that must not be set; the text says so after `place: `.

    `meant` is the path of the setting that was probably meant, or None.
    """

    def __init__(self, said: str, meant: str | None = None) -> None:
        super().__init__(said)
        self.meant = meant


@cache
def settings_by_path() -> Mapping[str, Setting]:
    """Every setting of the run file by its dotted path, in the order of the schema."""
    found = {setting.name: setting for setting in settings_of(RunConfig) if setting.name in TOP_LEVEL}
    for section, owner in SECTIONS.items():
        found.update({f"{section}.{setting.name}": setting for setting in settings_of(owner)})
    return MappingProxyType(found)


@cache
def _paths_by_spelling() -> Mapping[str, str]:
    """Paths by every spelling that a flag has (`max_seq_length` -> `data.max_length`), and by the setting's name."""
    found: dict[str, str] = {}
    for path, setting in settings_by_path().items():
        for spelling in (setting.name, *setting.flags):
            found.setdefault(folded(spelling.lstrip("-")), path)
    return MappingProxyType(found)


def folded(name: str) -> str:
    """A key as the schema spells it: `-` and `_` are one letter."""
    return name.strip().replace("-", "_")


def first_setting(section: str) -> str:
    """The path that a section's bare value sets: `model: some/folder` is `model.model`."""
    return f"{section}.{next(settings_of(SECTIONS[section])).name}"


def target_of(path: str) -> Target:
    """What a dotted, folded path stands for. Raises `UnknownNameError`, with the nearest name where there is one."""
    settings = settings_by_path()
    section, _, name = path.partition(".")
    if path in settings:
        field = fields_for(METHOD).get(name) if section == "train" else None
        return Target.of_setting(path, settings[path], field.choices if field else ())
    if section in SECTIONS and not name:
        return target_of(first_setting(section))
    if section in PLUGIN_SECTIONS and name and "." not in name:
        return Target(path=path, annotation=None)
    if section == "train" and name in fields_for(METHOD):
        return _trl_target(path, name)
    raise UnknownNameError(_why_unknown(section, name), probably_meant(section, name))


def probably_meant(section: str, name: str) -> str | None:
    """The path of the setting that an unknown key stands for, or None where nothing is near."""
    elsewhere = _paths_by_spelling().get(name or section)
    if elsewhere is not None:
        return elsewhere
    if not name:
        close = nearest(section, [*TOP_LEVEL, *SECTIONS])
        return None if not close else first_setting(close[0]) if close[0] in SECTIONS else close[0]
    close = nearest(name, [path.partition(".")[2] for path in settings_by_path() if path.startswith(f"{section}.")])
    return f"{section}.{close[0]}" if close else None


def why_no_option(section: str, name: str, options: list[str], title: str) -> str:
    """What to say of a key under `launch:` or `backend:` that neither the schema nor the chosen plugin knows.

    `options` are the plugin's, `title` is what it is called (`backend ddp`).
    """
    misspelt = why_misspelt(section, name, options)
    if misspelt is not None:
        return misspelt
    listed = f"its options: {', '.join(options)}" if options else "it has none"
    return f"{title} has no option of that name; {listed}"


def why_misspelt(section: str, name: str, options: list[str]) -> str | None:
    """What to say of a key under `launch:` or `backend:` that is near a known one or belongs elsewhere, else None."""
    elsewhere = _paths_by_spelling().get(name)
    if elsewhere is not None:
        return f"unknown key; {_place(elsewhere)}"
    own = [path.partition(".")[2] for path in settings_by_path() if path.startswith(f"{section}.")]
    close = nearest(name, [*own, *options])
    return f"unknown key (did you mean {close[0]}?)" if close else None


def _trl_target(path: str, name: str) -> Target:
    if name in OWNED:
        raise UnknownNameError(f"may not be set here; {OWNED[name]}")
    return Target.of_trl_field(path, fields_for(METHOD)[name])


def _why_unknown(section: str, name: str) -> str:
    if section not in SECTIONS:
        return _why_no_section(section) if name else _why_unknown_at_top(section)
    if "." in name:
        setting = name.partition(".")[0]
        return f"a path has two parts; write {section}.{setting}={{key: value}} for a value that is a mapping"
    elsewhere = _paths_by_spelling().get(name)
    if elsewhere is not None:
        return f"unknown key; {_place(elsewhere)}"
    names = [path.partition(".")[2] for path in settings_by_path() if path.startswith(f"{section}.")]
    if section == "train":
        # Names that Fleettune owns may not be set, but a misspelt one of them deserves its answer too.
        names += [field for field in fields_for(METHOD) if field not in names]
    return "unknown key" + _suggest(name, names)


def _why_no_section(section: str) -> str:
    close = nearest(section, SECTIONS)
    return (
        f"unknown section (did you mean {close[0]}?)" if close else f"unknown section; valid are {', '.join(SECTIONS)}"
    )


def _why_unknown_at_top(name: str) -> str:
    elsewhere = _paths_by_spelling().get(name)
    if elsewhere is not None:
        return f"unknown key; {_place(elsewhere)}"
    if name in fields_for(METHOD):
        return f"unknown key; {name} belongs under train:"
    close = nearest(name, [*TOP_LEVEL, *SECTIONS])
    if close:
        return f"unknown key (did you mean {close[0]}?)"
    close = nearest(name, _paths_by_spelling())
    if close:
        return f"unknown key (did you mean {_paths_by_spelling()[close[0]]}?)"
    return f"unknown key; valid are {', '.join([*TOP_LEVEL, *SECTIONS])}"


def _suggest(name: str, names: list[str]) -> str:
    close = nearest(name, names)
    if close:
        return f" (did you mean {close[0]}?)"
    return "" if len(names) > 20 else f"; valid are {', '.join(names)}"


def _place(path: str) -> str:
    section, _, name = path.rpartition(".")
    return f"{name} belongs under {section}:" if section else f"it is called {name}, beside the sections"
