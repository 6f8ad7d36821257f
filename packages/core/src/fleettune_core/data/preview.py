"""The first examples as the model will see them, with the supervised part marked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from fleettune_core.config.schema import Data
from fleettune_core.data.formats import DetectedFormat, Example, convert, detect_format
from fleettune_core.data.source import open_source
from fleettune_core.data.tokens import Renderer, tokenize
from fleettune_core.errors import FtError


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A piece of an example's text, supervised or not as a whole."""

    text: str
    supervised: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewExample:
    """One example. Its segments, put together, are its whole text."""

    where: str
    """File and line."""
    segments: tuple[Segment, ...]
    num_tokens: int | None = None
    """After the cut; None without a tokenizer."""
    supervised_tokens: int | None = None
    truncated: bool = False
    """Whether the end of the text is cut off in training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """How the rows are read, why, and the first of them."""

    format: str
    reason: str
    examples: tuple[PreviewExample, ...]
    note: str | None = None
    """What the reader must know: that no chat template was applied."""


def preview(data: Data, tokenizer: Any = None, *, count: int = 1, detected: DetectedFormat | None = None) -> Preview:
    """Render the first `count` rows.

    `tokenizer`: a fast transformers tokenizer; without one, conversations are shown turn by turn in a neutral form.
    `detected`: how the rows are read, where that is known already; otherwise all rows are looked at. `FtError` as
    `prepare` raises it.
    """
    if data.dataset is None:
        raise FtError("no data given", hint="--dataset FILE, a folder, a glob or a hub id")
    source = open_source(data.dataset, data)
    how = detected or detect_format(source.rows(), data.format)
    examples = [convert(row, how.format) for row in islice(source.rows(), count)]
    if tokenizer is None:
        shown = tuple(
            PreviewExample(where=example.where, segments=tuple(_neutral(example, data))) for example in examples
        )
        note = "no model given: shown without its chat template and tokens"
        return Preview(format=how.format, reason=how.reason, examples=shown, note=note)
    return Preview(
        format=how.format,
        reason=how.reason,
        examples=tuple(_rendered(example, tokenizer, data) for example in examples),
    )


def _rendered(example: Example, tokenizer: Any, data: Data) -> PreviewExample:
    rendered = Renderer(tokenizer, train_on=data.train_on).render(example)
    (row,) = tokenize([example], tokenizer, max_length=data.max_length, train_on=data.train_on)
    segments: list[Segment] = []
    done = 0
    for start, end in rendered.spans:
        segments += [Segment(text=rendered.text[done:start], supervised=False)] if start > done else []
        segments += [Segment(text=rendered.text[start:end], supervised=True)] if end > start else []
        done = end
    if done < len(rendered.text):
        segments.append(Segment(text=rendered.text[done:], supervised=False))
    if not rendered.by_template and tokenizer.eos_token is not None and not rendered.text.endswith(tokenizer.eos_token):
        segments.append(Segment(text=tokenizer.eos_token, supervised=True))
    return PreviewExample(
        where=example.where,
        segments=tuple(segments),
        num_tokens=len(row.input_ids),
        supervised_tokens=row.supervised_tokens,
        truncated=row.truncated,
    )


def _neutral(example: Example, data: Data) -> Iterator[Segment]:
    everything = data.train_on == "all"
    if example.messages:
        for index, turn in enumerate(example.messages):
            said = turn["role"] == "assistant" and index >= example.num_prompt_messages
            yield Segment(text=f"{turn['role']}: ", supervised=everything)
            yield Segment(text=f"{turn['content']}\n", supervised=everything or said)
    elif example.text is not None:
        yield Segment(text=example.text, supervised=True)
    else:
        yield Segment(text=example.prompt or "", supervised=everything)
        yield Segment(text=example.completion or "", supervised=True)
