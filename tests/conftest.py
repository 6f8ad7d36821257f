"""What all tests share: no network, no traces, and a tiny model to train."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Before anything imports huggingface_hub, which reads them once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest

from leave_no_trace import Traces, leaks_since, restore_environment
from tiny_model import make_tiny_model, write_tiny_rows


@pytest.fixture(autouse=True)
def leave_no_trace() -> Iterator[None]:
    """Fail a test that leaves an environment variable, a thread or a child process behind."""
    before = Traces.now()
    yield
    leaks = leaks_since(before)
    restore_environment(before)
    if leaks:
        pytest.fail("left behind:\n  " + "\n  ".join(leaks), pytrace=False)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a two-layer Llama of width 64 with a tokenizer and a chat template. Read it, do not write to it."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def tiny_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 64 rows of `prompt` and `completion`. Read it, do not write to it."""
    return write_tiny_rows(tmp_path_factory.mktemp("tiny-rows") / "rows.jsonl")
