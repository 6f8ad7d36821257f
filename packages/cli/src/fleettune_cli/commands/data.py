"""`ft data`: what a run would read. A tokenizer is imported by a process of its own, never here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click
import rich_click

from fleettune_cli import checks, schema_options, terminal
from fleettune_cli.lazy import CONTEXT_SETTINGS, FtGroup
from fleettune_cli.render_preview import print_preview
from fleettune_core.errors import ExitCode, FtError

if TYPE_CHECKING:
    from fleettune_core.config.schema import Data, Model, RunConfig
    from fleettune_core.data.preview import Preview

LIGHT_ENDINGS = (".json", ".jsonl", ".ndjson", ".csv")
"""Data files that are read without pyarrow (also compressed)."""

_MODEL_PATHS = ("model.model", "model.revision", "model.trust_remote_code")
_NOT_HERE = ("data.eval_dataset", "data.eval_split")

HUB_PATIENCE: Mapping[str, str] = MappingProxyType({"HF_HUB_ETAG_TIMEOUT": "5", "HF_HUB_DOWNLOAD_TIMEOUT": "10"})
"""Seconds that the hub gets to answer while somebody waits for a preview; what the user's environment says wins."""


@click.group(cls=FtGroup, context_settings=CONTEXT_SETTINGS, no_args_is_help=True)
def data() -> None:
    """Look at data as a run would read it."""


@schema_options.with_options(
    [
        *(option for option in schema_options.options_of("model") if option.path in _MODEL_PATHS),
        *(option for option in schema_options.options_of("data") if option.path not in _NOT_HERE),
    ]
)
@data.command(context_settings=CONTEXT_SETTINGS)
@click.argument("place", metavar="[DATA]", required=False, type=click.Path())
@rich_click.option(
    "--count", type=click.IntRange(min=1), default=1, metavar="N", help="How many examples to show. Default: 1."
)
@rich_click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def preview(ctx: click.Context, place: str | None, count: int, as_json: bool) -> int:
    """Show the format of DATA and its first examples, with the supervised part marked.

    DATA may also be said with --dataset. With --model the text is what that model's tokenizer gets; without it, the
    turns as they were read.
    """
    from fleettune_core.config.load import load_config
    from fleettune_core.types import current_environment

    env = current_environment()
    flags = schema_options.said(ctx)
    if place is not None:
        if "data.dataset" in flags:
            raise FtError(
                f"`{ctx.command_path}` got two data sets: DATA ({place}) and --dataset ({flags['data.dataset'][1]})",
                hint="give one of them",
                exit_code=ExitCode.USAGE,
            )
        flags["data.dataset"] = ("DATA", place)
    if "data.dataset" not in flags:
        raise FtError(
            f"`{ctx.command_path}` needs DATA, or --dataset DATA",
            hint=f"`{ctx.command_path} --help` shows how it is used",
            exit_code=ExitCode.USAGE,
        )
    config = load_config(file=None, flags=flags, sets=(), env=env, required=("data.dataset",)).config
    shown = read_preview(config, count, env)
    if as_json:
        click.echo(json.dumps(asdict(shown), indent=2, ensure_ascii=False))
    else:
        print_preview(shown, sys.stdout)
    return ExitCode.OK


def read_preview(config: RunConfig, count: int, env: Mapping[str, str]) -> Preview:
    """The preview: made here from plain files, else by a process of its own. Raises `FtError`."""
    from fleettune_core.data.files import find_files
    from fleettune_core.data.preview import preview as preview_here
    from fleettune_core.data.preview_main import from_dict
    from fleettune_core.models.resolve import resolve_model

    assert config.data.dataset is not None, "the argument DATA is required"
    files = find_files(config.data.dataset)
    asks_hub = [] if files is not None else [f"data {config.data.dataset}"]
    if config.model.model is not None:
        if resolve_model(config.model.model).kind == "hub":
            asks_hub.append(f"the tokenizer of {config.model.model}")
    elif files is not None and all(path.name.lower().removesuffix(".gz").endswith(LIGHT_ENDINGS) for path in files):
        return preview_here(config.data, count=count)
    if asks_hub and not checks.is_offline(env):
        terminal.say(f"asking the hub for {' and '.join(asks_hub)} …")
    return from_dict(_ask_process(config.data, config.model, count, env))


def _ask_process(data: Data, model: Model, count: int, env: Mapping[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "fleettune_core.data.preview_main", "--data", json.dumps(asdict(data))]
    command += ["--count", str(count)]
    if model.model is not None:
        command += ["--model", json.dumps(asdict(model))]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={"HF_HUB_DISABLE_TELEMETRY": "1", **HUB_PATIENCE, **env},
        check=False,
    )
    last_line = (done.stdout.strip().splitlines() or [""])[-1]
    try:
        answer: dict[str, Any] = json.loads(last_line)
    except json.JSONDecodeError:
        problems = done.stderr.strip().splitlines()[-8:]
        hint = "pip install 'fleettune[train]'" if "ModuleNotFoundError" in done.stderr else None
        raise FtError(
            f"the preview could not be made (exit code {done.returncode})",
            problems=problems,
            hint=hint,
            exit_code=ExitCode.CONFIG,
        ) from None
    return answer
