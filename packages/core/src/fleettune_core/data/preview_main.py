"""`python -m fleettune_core.data.preview_main`: a preview as one JSON object, made by a process of its own.

A preview with a model needs transformers, one of parquet or hub rows pyarrow or datasets. `ft data preview` asks this
process in these cases, so that control stays light.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fleettune_core.config.schema import Data, Model
from fleettune_core.data.preview import Preview, PreviewExample, Segment, preview
from fleettune_core.errors import ExitCode, FtError

_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.py", "*.tiktoken"]
_NOT_FILES = ["*/*", "*.index.json"]
"""What a tokenizer is made of in a hub repository, and what of it is not."""


def main(argv: list[str] | None = None) -> int:
    """Print a preview, or an error, as one line of JSON on stdout; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fleettune_core.data.preview_main", allow_abbrev=False)
    parser.add_argument("--data", required=True, help="the run file's section data, as JSON")
    parser.add_argument("--model", help="the run file's section model, as JSON; left out for no tokenizer")
    parser.add_argument("--count", type=int, default=1, help="how many examples to show")
    arguments = parser.parse_args(argv)
    try:
        data = Data(**json.loads(arguments.data))
        tokenizer = None if arguments.model is None else _tokenizer(Model(**json.loads(arguments.model)))
        print(json.dumps(asdict(preview(data, tokenizer, count=arguments.count))))
    except FtError as error:
        told = {
            "message": error.message,
            "hint": error.hint,
            "exit_code": int(error.exit_code),
            "problems": list(error.problems),
        }
        print(json.dumps({"error": told}))
        return int(error.exit_code)
    return int(ExitCode.OK)


def from_dict(value: Mapping[str, Any]) -> Preview:
    """The preview that `main` printed. Raises the `FtError` that it printed instead."""
    if "error" in value:
        told = value["error"]
        raise FtError(
            told["message"],
            hint=told["hint"],
            exit_code=ExitCode(told["exit_code"]),
            problems=told["problems"],
        )
    examples = tuple(
        PreviewExample(
            where=item["where"],
            segments=tuple(Segment(**segment) for segment in item["segments"]),
            num_tokens=item["num_tokens"],
            supervised_tokens=item["supervised_tokens"],
            truncated=item["truncated"],
        )
        for item in value["examples"]
    )
    return Preview(format=value["format"], reason=value["reason"], examples=examples, note=value["note"])


def _tokenizer(model: Model) -> Any:
    from fleettune_core.cache import cache_folder
    from fleettune_core.models.load import explain_load_error, load_tokenizer, materialise
    from fleettune_core.models.resolve import resolve_model

    assert model.model is not None, "a preview with a model names one"
    ref = resolve_model(model.model)
    if ref.kind != "hub":
        return load_tokenizer(materialise(ref, model, cache_folder()), model)
    # Of a hub model the tokenizer's files alone are fetched: a preview needs no weights. They are fetched at once,
    # because transformers asks for each by itself, and waits for each where there is no network.
    import huggingface_hub
    from transformers import AutoTokenizer

    hub: Any = huggingface_hub
    factory: Any = AutoTokenizer
    try:
        folder = hub.snapshot_download(
            ref.spec, revision=model.revision, allow_patterns=_FILES, ignore_patterns=_NOT_FILES
        )
        return factory.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise explain_load_error(error, name=ref.spec, what="tokenizer", revision=model.revision) from error


if __name__ == "__main__":
    sys.exit(main())
