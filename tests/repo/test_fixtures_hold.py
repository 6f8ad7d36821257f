"""The fixtures that the other tests rest on: each is shown to do what it says, the guards to fail."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading

import pytest

from leave_no_trace import Traces, leaks_since, restore_environment
from tiny_model import make_tiny_model


def test_the_guard_sees_a_leaked_environment_variable():
    before = Traces.now()
    os.environ["FT_LEFT_BEHIND"] = "1"
    assert leaks_since(before) == ["environment variable FT_LEFT_BEHIND: None -> '1'"]
    restore_environment(before)
    assert "FT_LEFT_BEHIND" not in os.environ


def test_the_guard_sees_a_changed_and_a_removed_variable(monkeypatch):
    monkeypatch.setenv("FT_CHANGED", "old")
    monkeypatch.setenv("FT_REMOVED", "old")
    before = Traces.now()
    os.environ["FT_CHANGED"] = "new"
    del os.environ["FT_REMOVED"]
    assert leaks_since(before) == [
        "environment variable FT_CHANGED: 'old' -> 'new'",
        "environment variable FT_REMOVED: 'old' -> None",
    ]
    restore_environment(before)
    assert (os.environ["FT_CHANGED"], os.environ["FT_REMOVED"]) == ("old", "old")


def test_the_guard_sees_a_thread_that_goes_on():
    before = Traces.now()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="goes-on")
    thread.start()
    try:
        assert leaks_since(before) == ["thread goes-on"]
    finally:
        stop.set()
        thread.join()
    assert leaks_since(before) == []


def test_the_guard_sees_a_child_process_that_goes_on():
    before = Traces.now()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        (leak,) = leaks_since(before)
        assert f"process {child.pid} " in leak
    finally:
        child.communicate(b"\n")
    assert leaks_since(before) == []


def test_no_test_reaches_the_hub():
    from huggingface_hub import constants

    assert constants.HF_HUB_OFFLINE


def test_the_tiny_model_is_the_same_bytes_every_time(tiny_model, tmp_path):
    again = make_tiny_model(tmp_path / "again")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        first, second = ((folder / name).read_bytes() for folder in (tiny_model, again))
        assert hashlib.sha256(first).digest() == hashlib.sha256(second).digest(), name


def test_the_tiny_model_loads_as_an_ordinary_folder_and_knows_chats(tiny_model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "two and two?"}], tokenize=False)
    assert text == "<|im_start|>user\ntwo and two?<|im_end|>\n"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == text
    assert model(ids).logits.shape == (1, ids.shape[1], len(tokenizer))


@pytest.mark.parametrize("column", ["prompt", "completion"])
def test_the_tiny_rows_have_many_lengths(tiny_rows, column):
    import json

    rows = [json.loads(line) for line in tiny_rows.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 64
    assert len({len(row[column]) for row in rows}) > 5
