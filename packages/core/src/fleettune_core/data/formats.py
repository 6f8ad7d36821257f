"""The four shapes of rows that supervised fine-tuning reads: telling which one it is, and reading one row of it.

| name | columns |
| --- | --- |
| `messages` | `messages`: a list of `{role, content}` |
| `prompt-completion` | `prompt` and `completion`: both text, or both lists of `{role, content}` |
| `text` | `text` |
| `alpaca` | `instruction` and `output`, and `input` where a task has one |

Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from fleettune_core.data.files import Row
from fleettune_core.errors import FtError, did_you_mean, nearest

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of a turn. What a model's chat template makes of them is its own affair."""

_OTHER_ROLES = MappingProxyType(
    {
        "human": "user",
        "prompter": "user",
        "gpt": "assistant",
        "bot": "assistant",
        "model": "assistant",
    }
)
"""What other data sets call a role."""

_TYPE_NAMES = MappingProxyType(
    {str: "text", list: "a list", dict: "an object", bool: "true or false", int: "a number", float: "a number"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One shape of rows, by its columns."""

    name: str
    required: Mapping[str, tuple[type, ...]]
    """Columns that every row has, and the types that a value may have."""
    optional: Mapping[str, tuple[type, ...]]
    looks_like: str

    def problem(self, values: Mapping[str, Any]) -> str | None:
        """Why a row is not of this shape, or None."""
        for column, types in self.required.items():
            if column not in values:
                return f"has no column {column!r}"
            if not isinstance(values[column], types):
                wanted = " or ".join(_TYPE_NAMES[kind] for kind in types)
                return f"has {_describe(values[column])} in column {column!r}, not {wanted}"
        for column, types in self.optional.items():
            value = values.get(column)
            if value is not None and not isinstance(value, types):
                wanted = " or ".join(_TYPE_NAMES[kind] for kind in types)
                return f"has {_describe(value)} in column {column!r}, not {wanted}"
        return None


def _shape(name: str, looks_like: str, required: dict[str, tuple[type, ...]], **optional: tuple[type, ...]) -> Shape:
    return Shape(
        name=name, required=MappingProxyType(required), optional=MappingProxyType(optional), looks_like=looks_like
    )


SHAPES: tuple[Shape, ...] = (
    _shape(
        "messages", '{"messages": [{"role": "user", "content": …}, {"role": "assistant", …}]}', {"messages": (list,)}
    ),
    _shape(
        "prompt-completion",
        '{"prompt": …, "completion": …}, both text or both lists of messages',
        {"prompt": (str, list), "completion": (str, list)},
    ),
    _shape("text", '{"text": …}', {"text": (str,)}),
    _shape(
        "alpaca",
        '{"instruction": …, "input": … (may be left out), "output": …}',
        {"instruction": (str,), "output": (str,)},
        input=(str,),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectedFormat:
    """How the rows are read, and why."""

    format: str
    reason: str


class FormatDetector:
    """Looks at rows one by one and says at the end which shape all of them have.

    Holds counts and the first exceptions, never rows.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self._columns: dict[str, None] = {}
        self._fitting: dict[str, int] = {shape.name: 0 for shape in SHAPES}
        self._misfit: dict[str, tuple[str, str]] = {}
        """Per shape: where the first row is that does not have it, and why."""
        self._two: tuple[str, list[str]] | None = None
        """Where the first row is that has two shapes, and which."""
        self._first: str = ""

    def add(self, row: Row) -> None:
        """Look at one more row."""
        self.num_rows += 1
        self._first = self._first or row.where
        values = row.values
        self._columns.update(dict.fromkeys(values))
        fits: list[str] = []
        for shape in SHAPES:
            problem = shape.problem(values)
            if problem is None:
                self._fitting[shape.name] += 1
                fits.append(shape.name)
            elif shape.name not in self._misfit:
                self._misfit[shape.name] = (row.where, problem)
        if len(fits) > 1 and self._two is None:
            self._two = (row.where, fits)

    def result(self, forced: str | None = None) -> DetectedFormat:
        """The shape of all rows. `forced` is what the user said; then only that is checked.

        `FtError` when there is no row, when no shape fits, when two do, and when some row, named by file and line,
        has another shape than the rest.
        """
        if not self.num_rows:
            raise FtError("no rows")
        if forced is not None:
            return self._forced(forced)
        if self._two is not None:
            where, names = self._two
            raise FtError(
                f"{where}: a row can be read in two ways: {' and '.join(names)}",
                problems=(f"columns: {', '.join(self._columns)}",),
                hint=f"say which with --data-format {' or --data-format '.join(names)}",
            )
        fitting = [name for name, count in self._fitting.items() if count]
        if not fitting:
            raise self._nothing_fits()
        usual = max(fitting, key=lambda name: self._fitting[name])
        if self._fitting[usual] < self.num_rows:
            where, problem = self._misfit[usual]
            others = [f"{self._fitting[name]} are {name}" for name in fitting if name != usual]
            counts = ", ".join([f"{self._fitting[usual]} of {self.num_rows} rows are {usual}", *others])
            raise FtError(f"{where}: the row {problem}", problems=(counts,), hint="all rows must have one shape")
        return DetectedFormat(
            format=usual, reason=f"all {self.num_rows} rows have {self._column_names(usual)}{self._unused(usual)}"
        )

    def _forced(self, forced: str) -> DetectedFormat:
        if forced in self._misfit:
            where, problem = self._misfit[forced]
            raise FtError(
                f"{where}: the row {problem}, as --data-format {forced} needs",
                problems=(*self._columns_found(), f"{forced} is {_named(forced).looks_like}"),
            )
        return DetectedFormat(format=forced, reason=f"--data-format {forced}{self._unused(forced)}")

    def _nothing_fits(self) -> FtError:
        wrong_types = [
            f"{shape.name}: the row at {self._misfit[shape.name][0]} {self._misfit[shape.name][1]}"
            for shape in SHAPES
            if all(column in self._columns for column in shape.required)
        ]
        shapes = [f"{shape.name}: {shape.looks_like}" for shape in SHAPES]
        advice = _advice(self._columns)
        found = (f"columns found: {', '.join(self._columns)}",) if advice else self._columns_found()
        return FtError(
            f"{self._first}: the rows have none of the four shapes that can be trained on",
            problems=(*found, *(wrong_types or shapes)),
            hint=advice or "rename the columns; `ft data preview` shows how rows are read",
        )

    def _columns_found(self) -> tuple[str, ...]:
        wanted = [column for shape in SHAPES for column in shape.required]
        names = [column if column in wanted else column + did_you_mean(column, wanted) for column in self._columns]
        return (f"columns found: {', '.join(names) or 'none'}",)

    def _column_names(self, name: str) -> str:
        return " and ".join(_named(name).required)

    def _unused(self, name: str) -> str:
        shape = _named(name)
        unused = [column for column in self._columns if column not in shape.required and column not in shape.optional]
        return f"; not used: {', '.join(unused)}" if unused else ""


def detect_format(rows: Iterable[Row], forced: str | None = None) -> DetectedFormat:
    """The shape of all `rows` (see `FormatDetector.result`)."""
    detector = FormatDetector()
    for row in rows:
        detector.add(row)
    return detector.result(forced)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One row, ready to be rendered: a conversation, or a prompt with its completion, or plain text.

    An alpaca row is a conversation and has a prompt and a completion as well: for a tokenizer without a chat template.
    """

    where: str
    """File and line, for errors."""
    messages: tuple[Mapping[str, Any], ...] = ()
    num_prompt_messages: int = 0
    """Leading messages that belong to the prompt: an assistant's turn among them is not supervised."""
    prompt: str | None = None
    completion: str | None = None
    text: str | None = None


def convert(row: Row, format: str) -> Example:
    """Read one row of a known shape. `FtError` with file and line when the row is bad."""
    values, where = row.values, row.where
    problem = _named(format).problem(values)
    if problem is not None:
        raise FtError(f"{where}: the row {problem}")
    if format == "messages":
        messages = _turns(where, "messages", values["messages"])
        _needs_assistant(where, "messages", messages)
        return Example(where=where, messages=messages)
    if format == "text":
        return Example(where=where, text=_text(where, "text", values["text"]))
    if format == "prompt-completion":
        return _prompt_completion(where, values["prompt"], values["completion"])
    instruction = _text(where, "instruction", values["instruction"])
    extra = _text(where, "input", values.get("input") or "")
    output = _text(where, "output", values["output"])
    user = f"{instruction}\n\n{extra}" if extra else instruction
    return Example(
        where=where,
        messages=({"role": "user", "content": user}, {"role": "assistant", "content": output}),
        num_prompt_messages=1,
        prompt=plain_prompt(instruction, extra),
        completion=output,
    )


def plain_prompt(instruction: str, extra: str) -> str:
    """An alpaca task for a tokenizer without a chat template; the answer follows on the next line."""
    middle = f"Input:\n{extra}\n\n" if extra else ""
    return f"Task:\n{instruction}\n\n{middle}Answer:\n"


def _prompt_completion(where: str, prompt: Any, completion: Any) -> Example:
    if isinstance(prompt, str) and isinstance(completion, str):
        return Example(
            where=where, prompt=_text(where, "prompt", prompt), completion=_text(where, "completion", completion)
        )
    if isinstance(prompt, str) or isinstance(completion, str):
        raise FtError(
            f"{where}: prompt is {_describe(prompt)} and completion is {_describe(completion)}",
            hint="both must be text, or both lists of messages",
        )
    before = _turns(where, "prompt", prompt)
    after = _turns(where, "completion", completion)
    _needs_assistant(where, "completion", after)
    return Example(where=where, messages=before + after, num_prompt_messages=len(before))


def _turns(where: str, column: str, value: list[Any]) -> tuple[Mapping[str, Any], ...]:
    if not value:
        raise FtError(f"{where}: {column} is empty")
    return tuple(_turn(where, f"{column}[{index}]", turn) for index, turn in enumerate(value))


def _turn(where: str, place: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise FtError(f"{where}: {place} is {_describe(value)}, not an object with role and content")
    turn = cast("dict[str, Any]", value)
    for key in ("role", "content"):
        if key not in turn:
            sharegpt = "from" in turn and "value" in turn
            hint = "rename from to role and value to content, human to user and gpt to assistant" if sharegpt else None
            raise FtError(f"{where}: {place} has no {key}; it has {', '.join(turn) or 'nothing'}", hint=hint)
    role = turn["role"]
    if role not in ROLES:
        close = [_OTHER_ROLES.get(role) or ""] if isinstance(role, str) else []
        close = [name for name in close if name] or (nearest(role, ROLES) if isinstance(role, str) else [])
        said = f" (did you mean {close[0]}?)" if close else ""
        raise FtError(f"{where}: {place} has the role {role!r}{said}; roles are {', '.join(ROLES)}")
    if turn.get("tool_calls"):
        raise FtError(
            f"{where}: {place} has tool_calls, which are not trained on",
            hint="write the call into content, as the model should say it",
        )
    if not isinstance(turn["content"], str):
        raise FtError(f"{where}: {place}.content is {_describe(turn['content'])}, not text")
    _text(where, f"{place}.content", turn["content"])
    # Columnar files give every turn the keys of all turns; a null there says "not mine".
    return {key: item for key, item in turn.items() if item is not None}


def _needs_assistant(where: str, column: str, turns: Iterable[Mapping[str, Any]]) -> None:
    if not any(turn["role"] == "assistant" for turn in turns):
        raise FtError(f"{where}: {column} has no turn of the assistant: nothing in it could be learnt")


def _text(where: str, name: str, value: str) -> str:
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise FtError(
                f"{where}: {name} holds half a character: \\u{ord(value[error.start]):04x} without its partner"
            ) from None
    return value


def _advice(columns: Mapping[str, None]) -> str | None:
    if "conversations" in columns:
        shape = (
            "this is ShareGPT's shape: rename conversations to messages, from to role, value to content,"
            " human to user, gpt to assistant"
        )
        pairs = " (and chosen and rejected are preference pairs, which method sft does not use)"
        return shape + (pairs if "chosen" in columns and "rejected" in columns else "")
    if "chosen" in columns and "rejected" in columns:
        return "these are preference pairs, and method sft learns from one answer: rename chosen to completion"
    return None


def _named(name: str) -> Shape:
    return next(shape for shape in SHAPES if shape.name == name)


def _describe(value: object) -> str:
    if value is None:
        return "null"
    kind: type = type(value)
    return _TYPE_NAMES.get(kind, kind.__name__)
