"""`ft train`: read the command line, plan, and either show the plan or follow the run to its end."""

from __future__ import annotations

import difflib
import itertools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click
import rich_click

from fleettune_cli import schema_options
from fleettune_cli.lazy import CONTEXT_SETTINGS, FtCommand
from fleettune_cli.words import fold, words_typed
from fleettune_core.config.schema import SECTIONS
from fleettune_core.errors import ExitCode, FtError
from fleettune_core.masking import MASK, is_secret

if TYPE_CHECKING:
    from fleettune_core.plan.model import Plan

PANEL = "Output"
_SLIP = 0.8
"""How alike (`difflib`) a variable's name and an option's must be for one to be taken for the other."""


class TrainCommand(FtCommand):
    """Adds where an unknown option's meaning is found: TRL's own fields go through `--set`."""

    @property
    def unknown_option_hints(self) -> Mapping[str, str]:
        from fleettune_core.config.trl_fields import OWNED, fields_for

        through_set = {name: f"a field of TRL's config: write --set train.{name}=VALUE" for name in fields_for("sft")}
        return {**through_set, **OWNED}


@schema_options.with_options(
    [
        *(
            option
            for section in ("model", "data", "train", "batch", "launch", "backend")
            for option in schema_options.options_of(section)
        ),
        *schema_options.plugin_options(),
        *schema_options.options_of("checkpoint"),
        *schema_options.options_of(""),
    ]
)
@click.command(cls=TrainCommand, context_settings=CONTEXT_SETTINGS)
@click.argument("words", nargs=-1, metavar="[RUN.yaml]", type=click.Path())
@schema_options.set_option("Any key of the run file, a plugin's option, or a field of TRL's config (train.NAME).")
@rich_click.option("--dry-run", is_flag=True, panel=PANEL, help="Print the plan, start nothing.")
@rich_click.option(
    "--json", "as_json", is_flag=True, panel=PANEL, help="Print the plan (--dry-run) or the report as JSON on stdout."
)
@rich_click.option(
    "--explain", is_flag=True, panel=PANEL, help="Add every value to the plan, with its source and what it beat."
)
@rich_click.option("--quiet", "-q", is_flag=True, panel=PANEL, help="No plan and no progress, only the result.")
@click.pass_context
def train(
    ctx: click.Context,
    words: tuple[str, ...],
    sets: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
    explain: bool,
    quiet: bool,
) -> int:
    """Fine-tune a language model.

    Values come from the flags, then the run file, then the defaults; the plan shows where each came from.
    """
    file = run_file(ctx, words)

    from fleettune_cli.render_plan import print_plan
    from fleettune_core.config.load import read_config
    from fleettune_core.plan.solve import make_plan
    from fleettune_core.types import current_environment

    env = current_environment()
    loaded = read_config(file=file, flags=schema_options.said(ctx), sets=sets, env=env)
    plan = make_plan(loaded, env=env)
    speaks = plan.process is None or plan.process.rank == 0
    if dry_run:
        if speaks:
            show_plan(plan, as_json=as_json, explain=explain)
        return ExitCode.OK
    if speaks and not quiet:
        print_plan(plan, sys.stderr, explain=explain, compact=True)
    if plan.process is not None:
        from fleettune_core.run import become_worker

        sys.stdout.flush()
        sys.stderr.flush()
        become_worker(plan, as_json=as_json)
    return execute(plan, env, as_json=as_json, quiet=quiet)


def show_plan(plan: Plan, *, as_json: bool, explain: bool) -> None:
    """Print the plan on stdout, and nothing else there."""
    from fleettune_cli.render_plan import print_plan

    if not as_json:
        print_plan(plan, sys.stdout, explain=explain)
        return
    from fleettune_core.plan.serialise import to_dict

    click.echo(json.dumps(to_dict(plan), indent=2, ensure_ascii=False))


def execute(plan: Plan, env: Mapping[str, str], *, as_json: bool, quiet: bool) -> int:
    """Start the plan and follow it to its end: progress and report on stderr, the model's place on stdout."""
    from fleettune_cli.follow import Interrupts, follow
    from fleettune_cli.progress import display_for
    from fleettune_cli.render_report import print_report
    from fleettune_core.report import model_of, with_places
    from fleettune_core.run import start

    with Interrupts() as interrupts:
        run = start(plan, env=env)
        with display_for(sys.stderr, quiet=quiet) as display:
            follow(run, display, interrupts)
        outcome = run.finish()
    done = outcome.exit_code == ExitCode.OK
    if not (quiet and done):
        print_report(outcome.report, run.run_dir, sys.stderr, lora=plan.config.model.lora)
    if as_json:
        click.echo(json.dumps(with_places(outcome.report, run.run_dir), indent=2, ensure_ascii=False))
    elif (model := model_of(outcome.report, run.run_dir)) is not None:
        click.echo(str(model))
    if interrupts.received is not None and outcome.exit_code not in (ExitCode.OK, ExitCode.STOPPED):
        return ExitCode.INTERRUPTED
    return outcome.exit_code


def run_file(ctx: click.Context, words: tuple[str, ...]) -> Path | None:
    """The run file among the words that belong to no option; `FtError` for a word that is none."""
    stray = [word for word in words if _assignment(word) or _is_switch_value(word)]
    for word in stray or words[1:]:
        raise FtError(
            f"`{ctx.command_path}` does not understand {_without_secret(word)!r} here",
            hint=_hint_for_stray(ctx, word),
            exit_code=ExitCode.USAGE,
        )
    return Path(words[0]) if words else None


def _assignment(word: str) -> bool:
    name, equals, _ = word.partition("=")
    return bool(equals) and "/" not in name and not Path(word).exists()


def _is_switch_value(word: str) -> bool:
    return word.lower() in ("true", "false") and not Path(word).exists()


def _without_secret(word: str) -> str:
    """`word` as it may be shown: of `TOKEN=abc` the name alone."""
    name, equals, value = word.partition("=")
    return f"{name}={MASK}" if equals and value and is_secret(name, value) else word


def _hint_for_stray(ctx: click.Context, word: str) -> str:
    if _is_switch_value(word):
        return _how_to_switch(ctx)
    if "=" not in word:
        return f"give one run file, `{ctx.command_path} RUN.yaml`, and everything else as --options"
    word = _without_secret(word)
    name, _, value = word.partition("=")
    options = {
        flag.removeprefix("--"): option
        for option in schema_options.setting_options(ctx)
        for flag in option.opts
        if flag.startswith("--")
    }
    spelled = fold(name).lower().removeprefix("--")
    if spelled in options:
        return f"nothing reads a variable after the command; {_write(options[spelled], spelled, value)}"
    if "." in name and name.partition(".")[0] in SECTIONS:
        return f"write --set {word}"
    # Short names resemble many options: what is no clear slip of the finger is taken for a variable.
    close = difflib.get_close_matches(spelled, options, n=1, cutoff=_SLIP)
    if close:
        return _write(options[close[0]], close[0], value)
    return f"a variable stands before the command: {word} {ctx.command_path} …"


def _write(option: schema_options.SettingOption, name: str, value: str) -> str:
    if option.is_flag:
        return f"--{name} is a switch: write --{name} or --no-{name}"
    return f"write --{name} {value}"


def _how_to_switch(ctx: click.Context) -> str:
    """For a stray true or false: the switch that it was typed after, where that can be told."""
    name = "lora"
    typed = words_typed(ctx)
    for before, word in itertools.pairwise(typed):
        if _is_switch_value(word) and before.startswith("--") and "=" not in before:
            name = fold(before.removeprefix("--")).removeprefix("no-")
    return f"a switch takes no value: write --{name} or --no-{name}"
