"""From examples to token ids, with the supervised ones marked.

Works on a `transformers` tokenizer that is handed over; imports none of it. The tokenizer must be a fast one, because
it says which characters each token stands for.

What is supervised by default: of a conversation every assistant's turn, its content and its end-of-turn token; of
prompt and completion the completion and the end of sequence; of plain text everything.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal, cast

from fleettune_core.data.formats import Example
from fleettune_core.errors import FtError

IGNORE = -100
"""The label of a token that is not supervised; torch's cross entropy passes it over."""

_ROWS_PER_CALL = 1000
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\b")
_PLACEHOLDER = "\ue000placeholder\ue001"
"""Stands in for a turn's content; begins and ends with private-use characters, which no data holds."""

TrainOn = Literal["completion", "all"]
Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """The text of one example, and which of its characters are supervised."""

    where: str
    text: str
    spans: tuple[Span, ...]
    """Supervised characters, as (start, end), in order, apart from each other."""
    by_template: bool
    """Whether a chat template made the text. Then it holds all special tokens already; otherwise the tokenizer adds
    its own, and the end of sequence follows and is supervised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedRow:
    """One example as the model sees it."""

    input_ids: list[int]
    labels: list[int]
    """As long as `input_ids`; `IGNORE` where nothing is supervised. The first is always ignored: nothing predicts
    it."""
    truncated: bool
    """Whether its end was cut off."""
    supervised_tokens: int

    @property
    def dropped(self) -> bool:
        """Whether nothing in it can be learnt: no supervised token, or none left after the cut."""
        return self.supervised_tokens == 0


def tokenize(
    examples: Iterable[Example], tokenizer: Any, *, max_length: int, train_on: TrainOn = "completion"
) -> Iterator[TokenizedRow]:
    """One `TokenizedRow` for each example, in order; longer ones keep their first `max_length` tokens.

    Rows in which nothing can be learnt come as well, with `dropped` true. `FtError` when the tokenizer is not a fast
    one, when it has no chat template and a conversation needs one, and when the template does not tell which part
    the assistant said.
    """
    renderer = Renderer(tokenizer, train_on=train_on)
    rows = iter(examples)
    while batch := list(islice(rows, _ROWS_PER_CALL)):
        rendered = [renderer.render(example) for example in batch]
        for by_template, group in groupby(rendered, key=lambda item: item.by_template):
            yield from _tokenize_batch(list(group), tokenizer, max_length, special=not by_template)


def _tokenize_batch(
    batch: Sequence[Rendered], tokenizer: Any, max_length: int, *, special: bool
) -> Iterator[TokenizedRow]:
    encoded = tokenizer(
        [item.text for item in batch],
        add_special_tokens=special,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    end = cast("int | None", tokenizer.eos_token_id) if special else None
    for item, ids, offsets in zip(batch, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        yield _label(item, list(ids), list(offsets), end, max_length)


def _label(item: Rendered, ids: list[int], offsets: list[Span], end: int | None, max_length: int) -> TokenizedRow:
    """`offsets`: the characters of each token. `end`: the token that closes the text and is supervised.

    A token is supervised when any of its characters is: in "Answer: 4" the token " 4" holds the prompt's last blank,
    and is all there is to learn.
    """
    if end is not None:
        if ids and ids[-1] == end:
            # The tokenizer, or the text itself, has closed it already. A token that a tokenizer adds lies at 0.
            ids.pop()
            offsets.pop()
        ids.append(end)
    labels = [IGNORE] * len(ids)
    starts = [start for start, _ in offsets]
    ends = [stop for _, stop in offsets]
    for first, last in item.spans:
        low, high = bisect_right(ends, first), bisect_left(starts, last)
        labels[low:high] = ids[low:high]
    if end is not None:
        labels[-1] = end
    if labels:
        labels[0] = IGNORE
    truncated = len(ids) > max_length
    labels = labels[:max_length]
    return TokenizedRow(
        input_ids=ids[:max_length],
        labels=labels,
        truncated=truncated,
        supervised_tokens=len(labels) - labels.count(IGNORE),
    )


class Renderer:
    """Writes examples as the text that a model reads. Asks the tokenizer for its template once."""

    def __init__(self, tokenizer: Any, *, train_on: TrainOn = "completion") -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise FtError(
                f"the tokenizer {_name(tokenizer)} is not a fast one: it does not say which characters a token is",
                hint="use a model with a tokenizer.json",
            )
        self._tokenizer = tokenizer
        self._train_on = train_on

    def render(self, example: Example) -> Rendered:
        """The text of `example` with its supervised characters."""
        if example.messages and self._has_template:
            return self._conversation(example)
        if example.text is not None:
            return _plain(example, example.text, 0)
        if example.prompt is None or example.completion is None:
            raise FtError(
                f"the tokenizer {_name(self._tokenizer)} has no chat template, and the rows are conversations"
                f" (the first one: {example.where})",
                hint="use a chat model (often named …-Instruct), or rows of prompt and completion, or of text",
            )
        start = 0 if self._train_on == "all" else len(example.prompt)
        return _plain(example, example.prompt + example.completion, start)

    @cached_property
    def _has_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @cached_property
    def _has_marks(self) -> bool:
        return bool(_GENERATION_MARK.search(self._tokenizer.get_chat_template()))

    @cached_property
    def _ends_of_turn(self) -> tuple[str, ...]:
        """Special tokens as text, longest first: one of them ends a turn."""
        added = cast("Mapping[int, Any]", self._tokenizer.added_tokens_decoder).values()
        names = {str(token.content) for token in added if token.special} | set(self._tokenizer.all_special_tokens)
        return tuple(sorted(names, key=len, reverse=True))

    def _conversation(self, example: Example) -> Rendered:
        messages = example.messages
        try:
            text = self._apply(messages)
        except Exception as error:
            # Templates refuse what they do not know (a role, an order of turns) in words of their own.
            raise FtError(f"{example.where}: the model's chat template refuses these messages: {error}") from error
        spans = ((0, len(text)),) if self._train_on == "all" else self._assistant_spans(example, text)
        return Rendered(where=example.where, text=text, spans=spans, by_template=True)

    def _assistant_spans(self, example: Example, text: str) -> tuple[Span, ...]:
        spans: list[Span] = []
        for index, turn in enumerate(example.messages):
            if turn["role"] == "assistant" and index >= example.num_prompt_messages:
                span = self._span_of_turn(example.messages, index, text)
                if span is None or (spans and span[0] < spans[-1][1]):
                    return self._marked_spans(example, text)
                spans.append(span)
        return tuple(spans)

    def _span_of_turn(self, messages: Sequence[Mapping[str, Any]], index: int, text: str) -> Span | None:
        """Where turn `index` lies in `text`: between the prompt that would be given for it, and the text that ends
        with it. None where the template does not render a conversation as a continuation of its beginning."""
        prompt = self._try_apply(messages[:index], add_generation_prompt=True)
        if prompt is None or not text.startswith(prompt):
            return None
        start = len(prompt)
        until = text if index == len(messages) - 1 else self._try_apply(messages[: index + 1])
        if until is not None and text.startswith(until) and len(until) >= start:
            return start, self._without_blanks(text, start, len(until))
        # A last turn may be rendered in another way than the same turn further up (reasoning is shown, then left out):
        # its beginning is known, and its end is where a conversation that differs in its content alone agrees again.
        changed = {**messages[index], "content": _PLACEHOLDER}
        other = self._try_apply((*messages[:index], changed, *messages[index + 1 :]))
        if other is None or _PLACEHOLDER not in other:
            return None
        tail = other.split(_PLACEHOLDER)[-1]
        end = len(text) - len(tail)
        if end < start or not text.endswith(tail):
            return None
        blanks = len(tail) - len(tail.lstrip())
        closing = next((token for token in self._ends_of_turn if tail.startswith(token, blanks)), None)
        return start, end + (blanks + len(closing) if closing else 0)

    def _without_blanks(self, text: str, start: int, end: int) -> int:
        """The end of a turn without the blanks behind its end-of-turn token: no model is asked for them."""
        stripped = text[start:end].rstrip()
        return start + len(stripped) if stripped.endswith(self._ends_of_turn) else end

    def _marked_spans(self, example: Example, text: str) -> tuple[Span, ...]:
        """Supervised characters by the template's own `{% generation %}` marks."""
        if not self._has_marks:
            raise FtError(
                f"{example.where}: the chat template of {_name(self._tokenizer)} does not tell which part the assistant"
                " said: a conversation is not rendered as a continuation of its beginning, and the template has no"
                " {% generation %} marks",
                hint="supervise everything with --train-on all, or give rows of prompt and completion",
            )
        encoded = self._tokenizer.apply_chat_template(
            [dict(turn) for turn in example.messages],
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True},
        )
        spans: list[Span] = []
        inside = False
        for mask, (start, end) in zip(encoded["assistant_masks"], encoded["offset_mapping"], strict=True):
            if mask and inside:
                spans[-1] = (spans[-1][0], end)
            elif mask:
                spans.append((start, end))
            inside = bool(mask)
        given = sum(turn["role"] == "assistant" for turn in example.messages[: example.num_prompt_messages])
        assert all(end <= len(text) for _, end in spans), "the template's marks lie outside its text"
        return tuple(spans[given:])

    def _apply(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False) -> str:
        return self._tokenizer.apply_chat_template(
            [dict(turn) for turn in messages], tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def _try_apply(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False) -> str | None:
        """As `_apply`; None where the template refuses a part of what it takes as a whole, in whatever way it does."""
        try:
            return self._apply(messages, add_generation_prompt=add_generation_prompt)
        except Exception:  # noqa: BLE001 (a template raises what it likes)
            return None


def _plain(example: Example, text: str, start: int) -> Rendered:
    return Rendered(where=example.where, text=text, spans=((start, len(text)),), by_template=False)


def _name(tokenizer: Any) -> str:
    # A hub id is said as it is; of a folder the last part is enough.
    name = str(getattr(tokenizer, "name_or_path", "")) or type(tokenizer).__name__
    return Path(name).name if Path(name).is_absolute() else name
