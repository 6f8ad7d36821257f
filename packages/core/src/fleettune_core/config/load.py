"""File, flags and environment become one frozen config, and the source of each value.

The strongest wins: flag (also `--set`) > environment (`FT_LAUNCHER`, `FT_BACKEND`) > run file > default. A relative
path in a run file means what it would mean on the command line: relative to the folder where `ft` is typed.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fleettune_core.config.known import (
    PLUGIN_SECTIONS,
    UnknownNameError,
    first_setting,
    folded,
    settings_by_path,
    target_of,
)
from fleettune_core.config.schema import SECTIONS, TOP_LEVEL, RunConfig
from fleettune_core.config.source import LoadedConfig, Source, ValueMistake
from fleettune_core.config.values import BadValueError, Given, Target, convert
from fleettune_core.config.yaml_file import Entry, YamlFileError, parse, read_file
from fleettune_core.errors import FtError
from fleettune_core.masking import MASK, is_secret, shown

ENVIRONMENT: Mapping[str, str] = MappingProxyType({"FT_LAUNCHER": "launch.launcher", "FT_BACKEND": "backend.backend"})
"""The only variables that say a setting, and which."""

REQUIRED: tuple[str, ...] = ("model.model", "data.dataset")
_SET_EXAMPLE = "write --set key.path=value, for instance --set train.adam_beta1=0.8"


def load_config(
    *,
    file: Path | None,
    flags: Mapping[str, tuple[str, Any]],
    sets: Sequence[str],
    env: Mapping[str, str],
    required: Sequence[str] = REQUIRED,
) -> LoadedConfig:
    """Merge a run file, flags, `--set` texts and the environment.

    `flags`: dotted path (`model.lora_r`) -> (the flag as typed, its value, typed or still text). `sets`: texts
    `key.path=value`. `required`: paths that must have a value in the end.

    Raises `FtError` with every mistake in `problems`: exit code 5 when the run file has one, 2 when only the command
    line has.
    """
    loaded = read_config(file=file, flags=flags, sets=sets, env=env, required=required)
    loaded.raise_mistakes()
    return loaded


def read_config(
    *,
    file: Path | None,
    flags: Mapping[str, tuple[str, Any]],
    sets: Sequence[str],
    env: Mapping[str, str],
    required: Sequence[str] = REQUIRED,
) -> LoadedConfig:
    """As `load_config`, but mistakes are kept in the result: `make_plan` raises them together with its own.

    Raises `FtError` for a run file that cannot be read at all.
    """
    return _Loader(file).load(flags=flags, sets=sets, env=env, required=required)


class _Loader:
    """One call of `read_config`: gathers candidates for each path, strongest first, and mistakes."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._candidates: dict[str, list[Given]] = {}
        self._targets: dict[str, Target] = {}
        self._values: dict[str, Any] = {}
        self._sources: dict[str, Source] = {}
        self._wrong: set[str] = set()
        """Paths that already have a mistake, which one more would only repeat."""
        self._meant: set[str] = set()
        """Paths that misspelt keys stand for."""
        self._mistakes: list[ValueMistake] = []

    def load(
        self,
        *,
        flags: Mapping[str, tuple[str, Any]],
        sets: Sequence[str],
        env: Mapping[str, str],
        required: Sequence[str],
    ) -> LoadedConfig:
        for path, (flag, value) in flags.items():
            text = value if isinstance(value, str) else None
            self._offer(path, Given(value=value, text=text, source=Source(kind="flag", where=flag)))
        for text in sets:
            self._offer_set(text)
        for variable, path in ENVIRONMENT.items():
            if value := env.get(variable, ""):
                self._offer(path, Given(value=value, text=value, source=Source(kind="environment", where=variable)))
        if self._file is not None:
            self._offer_file(self._file)
        self._wrong |= self._meant - self._candidates.keys()
        for path, candidates in self._candidates.items():
            self._choose(path, candidates)
        self._check_together()
        self._check_required(required)
        right = {path: value for path, value in self._values.items() if path not in self._wrong}
        return LoadedConfig(
            config=build_config(right),
            sources=MappingProxyType({path: self._sources[path] for path in right}),
            file=self._file,
            mistakes=tuple(sorted(self._mistakes, key=lambda mistake: mistake.line or sys.maxsize)),
            wrong=frozenset(self._wrong),
        )

    # Gathering

    def _offer(self, path: str, given: Given) -> None:
        try:
            target = target_of(path)
        except UnknownNameError as unknown:
            self._complain(path, given, str(unknown))
            if unknown.meant:
                self._meant.add(unknown.meant)
            return
        self._targets[target.path] = target
        self._candidates.setdefault(target.path, []).append(given)

    def _offer_set(self, text: str) -> None:
        key, equals, raw = text.partition("=")
        path = folded(key)
        if not equals or not all(path.split(".")):
            written = MASK if is_secret(key, text) else text
            self._mistakes.append(ValueMistake(text=f"--set {written}: not of the form key.path=value; {_SET_EXAMPLE}"))
            return
        source = Source(kind="flag", where=f"--set {path}")
        try:
            entry = parse(raw)
        except YamlFileError as mistake:
            unread = Given(value=raw, text=raw, source=source)
            if _takes_text(path):
                self._offer(path, unread)
            else:
                self._complain(path, unread, f"{shown(path, raw)}: {mistake.message}; {_SET_EXAMPLE}")
            return
        if entry is None or entry.value is None:
            given = Given(value=None, text=None, source=source)
        elif _takes_text(path) and not raw.startswith(("'", '"')) and not _is_list_of_names(path, entry):
            given = Given(value=raw, text=raw, source=source)
        else:
            given = Given(value=entry.value, text=entry.text, source=source)
        self._offer(path, given)

    def _offer_file(self, file: Path) -> None:
        root = read_file(file)
        if root is None:
            return
        if root.items is None:
            raise FtError(
                f"{file}:{root.line}: a run file is a mapping of sections",
                hint="write for instance `model: some/folder` on one line and `data: rows.jsonl` on the next",
            )
        first_lines: dict[str, int] = {}
        for key, line, entry in root.items:
            for path, path_line, item in self._paths_of(folded(key), line, entry):
                source = Source(kind="file", where=f"{file}:{path_line}")
                given = Given(value=item.value, text=item.text, source=source, line=path_line)
                if path in first_lines:
                    self._complain(path, given, f"given twice; the first time on line {first_lines[path]}")
                else:
                    first_lines[path] = path_line
                    self._offer(path, given)

    def _paths_of(self, key: str, line: int, entry: Entry) -> Iterator[tuple[str, int, Entry]]:
        if key not in SECTIONS:
            yield key, line, entry
        elif entry.items is not None:
            for name, name_line, item in entry.items:
                yield f"{key}.{folded(name)}", name_line, item
        elif isinstance(entry.value, list):
            self._meant.add(first_setting(key))
            said = f"{self._file}:{line}: {key}: a section is a mapping, not a list"
            self._mistakes.append(ValueMistake(text=said, line=line, in_file=True))
        elif entry.value is not None:
            yield first_setting(key), line, entry

    # Choosing

    def _choose(self, path: str, candidates: list[Given]) -> None:
        target = self._targets[path]
        winner, *losers = candidates
        try:
            value = convert(winner, target)
        except BadValueError as mistake:
            self._complain(path, winner, str(mistake))
            return
        for other in losers:
            if other.source.kind == "flag" and not _agrees(other, target, value):
                said = f"{shown(path, winner.value)}, but {other.source.where} says {shown(path, other.value)}"
                self._complain(path, winner, f"{said}; give one of them")
                return
        if value is None:  # "not said": the plan decides
            return
        beat = tuple((other.source.where, _beaten(path, other)) for other in losers if other.source.kind != "flag")
        self._values[path] = value
        self._sources[path] = dataclasses.replace(winner.source, beat=beat)

    def _check_together(self) -> None:
        """Settings that would do nothing, or that exclude each other: nothing is ignored silently."""
        values = self._values
        if "model.lora" not in self._candidates:
            for path in [path for path in values if path.startswith("model.lora_")]:
                self._complain_about(path, "has no effect without lora; add --lora (lora: true under model:)")
        eval_split, eval_dataset = values.get("data.eval_split", 0) > 0, "data.eval_dataset" in values
        if "train.eval_steps" in values and not (eval_split or eval_dataset):
            said = "there are no rows to evaluate on; add --eval-split SHARE or --eval-dataset DATA"
            self._complain_about("train.eval_steps", said)
        if eval_split and eval_dataset:
            where = self._candidates["data.eval_dataset"][0].source.where
            self._complain_about("data.eval_split", f"eval_dataset is given too ({where}); give one of them")

    def _check_required(self, required: Sequence[str]) -> None:
        for path in required:
            if path in self._values or path in self._wrong:
                continue
            setting = settings_by_path()[path]
            section = path.partition(".")[0]
            usual = f"{setting.flags[0]} {setting.metavar}, or `{section}: ...` in {self._file or 'run.yaml'}"
            self._mistakes.append(
                ValueMistake(text=f"no {setting.name} given: {usual}", in_file=self._file is not None)
            )

    # Complaining

    def _complain(self, path: str, given: Given, said: str) -> None:
        self._wrong.add(path)
        where = given.source.where if given.line is None else f"{given.source.where}: {path}"
        self._mistakes.append(
            ValueMistake(text=f"{where}: {said}", line=given.line or 0, in_file=given.line is not None)
        )

    def _complain_about(self, path: str, said: str) -> None:
        self._complain(path, self._candidates[path][0], said)


def build_config(values: Mapping[str, Any]) -> RunConfig:
    """The frozen config of typed values by dotted path; what no path says keeps its default."""
    settings = settings_by_path()
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    open_ended: dict[str, dict[str, Any]] = {"train": {}, **{section: {} for section in PLUGIN_SECTIONS}}
    for path, value in values.items():
        section, _, name = path.partition(".")
        if name:
            (sections if path in settings else open_ended)[section][name] = value
    sections["train"]["extra"] = MappingProxyType(open_ended["train"])
    whole: dict[str, Any] = {name: values.get(name) for name in TOP_LEVEL}
    whole |= {section: owner(**sections[section]) for section, owner in SECTIONS.items()}
    whole |= {field: MappingProxyType(open_ended[section]) for section, field in PLUGIN_SECTIONS.items()}
    return RunConfig(**whole)


def vary(
    loaded: LoadedConfig, values: Mapping[str, Any], source: Source, without: Collection[str] = ()
) -> LoadedConfig:
    """The same config with other `values` (typed, by dotted path), which come from `source`.

    `without`: paths, or whole sections, whose values are left out before.
    """
    kept = {
        path: value_at(loaded.config, path)
        for path in loaded.sources
        if not any(path == name or path.startswith(f"{name}.") for name in without)
    }
    return dataclasses.replace(
        loaded,
        config=build_config({**kept, **values}),
        sources=MappingProxyType(
            {path: source if path in values else loaded.sources[path] for path in {**kept, **values}}
        ),
    )


def value_at(config: RunConfig, path: str) -> Any:
    """The value at a dotted path, a plugin's option and a field of TRL's config too."""
    section, _, name = path.partition(".")
    if not name or path in settings_by_path():
        return getattr(getattr(config, section), name) if name else getattr(config, section)
    open_ended = config.train.extra if section == "train" else getattr(config, PLUGIN_SECTIONS[section])
    return open_ended[name]


def _agrees(other: Given, target: Target, value: Any) -> bool:
    try:
        return bool(convert(other, target) == value)
    except BadValueError:
        return False


def _beaten(path: str, given: Given) -> Any:
    return MASK if is_secret(path, given.value) else given.value


def _takes_text(path: str) -> bool:
    """Whether a `--set` value for this path needs no quotes, whatever YAML would make of it."""
    try:
        return bool(target_of(path).annotation in (str, str | None))
    except UnknownNameError:
        return True  # the name is the mistake to tell, not the value


def _is_list_of_names(path: str, entry: Entry) -> bool:
    """`--set model.lora_target=[q_proj, v_proj]`: brackets that are YAML, where names with commas are text."""
    try:
        return isinstance(entry.value, list) and target_of(path).joined
    except UnknownNameError:
        return False
