"""`ft verify`: the first steps of a run on several layouts and backends, and whether the numbers agree."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click
import rich_click

from fleettune_cli import schema_options, terminal
from fleettune_cli.commands.train import TrainCommand, run_file
from fleettune_cli.lazy import CONTEXT_SETTINGS
from fleettune_core.errors import ExitCode, FtError

if TYPE_CHECKING:
    from fleettune_core.plugins.catalog import Catalog
    from fleettune_core.verify.combinations import Verification

PANEL = "Verification"
_NOT_HERE = (
    *("data.eval_dataset", "data.eval_split", "train.max_steps", "train.epochs", "train.eval_steps"),
    *("batch.micro_batch", "batch.per_device_train_batch_size", "batch.gradient_accumulation_steps"),
)
"""Settings that the verification decides itself, or has no part for."""


@schema_options.with_options(
    [
        *(
            option
            for section in ("model", "data", "train", "batch", "")
            for option in schema_options.options_of(section)
            if option.path not in _NOT_HERE
        )
    ]
)
@click.command(cls=TrainCommand, context_settings=CONTEXT_SETTINGS)
@click.argument("words", nargs=-1, metavar="[RUN.yaml]", type=click.Path())
@rich_click.option(
    "--layouts",
    panel=PANEL,
    metavar="PxA,…",
    help="Processes × micro-batches that each accumulates, with commas. Default: 1x1,2x1,1x2.",
)
@rich_click.option(
    "--backends",
    panel=PANEL,
    metavar="NAME[:VALUE],…",
    help="Backends, with commas; a value behind a colon is the backend's first option (deepspeed:3 is ZeRO stage 3), "
    "NAME:OPTION=VALUE any other. Default: ddp, and every other one that is installed.",
)
@rich_click.option(
    "--steps", panel=PANEL, type=click.IntRange(min=1), default=5, metavar="N", help="Optimizer steps. Default: 5."
)
@schema_options.set_option("Any key of the run file.")
@rich_click.option("--keep-models", is_flag=True, panel=PANEL, help="Keep every run's model.")
@rich_click.option("--dry-run", is_flag=True, panel=PANEL, help="Print what would be compared, start nothing.")
@rich_click.option("--json", "as_json", is_flag=True, panel=PANEL, help="Print JSON on stdout.")
@rich_click.option("--quiet", "-q", is_flag=True, panel=PANEL, help="No progress, only the result.")
@click.pass_context
def verify(
    ctx: click.Context,
    words: tuple[str, ...],
    layouts: str | None,
    backends: str | None,
    steps: int,
    sets: tuple[str, ...],
    keep_models: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Check on your own run that every layout and backend gives the same numbers.

    The first steps run once for each combination, with the same rows and the same global batch, and are compared with
    the first one: losses and gradient norms step by step, and the weights at the end. Exit code 1 when they disagree.
    """
    file = run_file(ctx, words)

    from fleettune_core.config.load import read_config
    from fleettune_core.plugins.catalog import load_catalog
    from fleettune_core.types import current_environment
    from fleettune_core.verify.combinations import LAYOUTS, parse_backends, parse_layouts, plan_verification

    env, catalog = current_environment(), load_catalog()
    loaded = read_config(file=file, flags=schema_options.said(ctx), sets=sets, env=env)
    verification = plan_verification(
        loaded,
        layouts=parse_layouts(LAYOUTS if layouts is None else layouts),
        backends=parse_backends(_all_backends(catalog) if backends is None else backends, catalog),
        steps=steps,
        env=env,
        catalog=catalog,
    )
    if dry_run:
        _show(verification, as_json=as_json)
        return ExitCode.OK
    return _execute(verification, env, catalog, keep_models=keep_models, as_json=as_json, quiet=quiet)


def _all_backends(catalog: Catalog) -> str:
    """`ddp` first: it divides nothing, so it is what the others are compared with."""
    from fleettune_core.plugins.entries import PluginKind

    names = {entry.name for entry in catalog.entries(PluginKind.BACKEND)}
    return ",".join(sorted(names, key=lambda name: (name != "ddp", name)))


def _show(verification: Verification, *, as_json: bool) -> None:
    from fleettune_cli.render_verify import print_combinations
    from fleettune_core.verify.execute import to_dict

    if as_json:
        combinations = [
            {"title": item.title, "argv": list(item.plan.launch.argv) if item.plan.launch else []}
            for item in verification.combinations
        ]
        click.echo(json.dumps({**to_dict(verification, []), "combinations": combinations}, indent=2))
    else:
        print_combinations(verification, sys.stdout)


def _execute(
    verification: Verification,
    env: Mapping[str, str],
    catalog: Catalog,
    *,
    keep_models: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    from fleettune_cli.follow import Interrupts, follow
    from fleettune_cli.render_verify import line_of, print_result
    from fleettune_cli.verify_display import VerifyDisplay
    from fleettune_core.verify.execute import Verifier, to_dict

    verifier = Verifier(verification, env=env, catalog=catalog, keep_models=keep_models)
    total = len(verification.combinations)
    if not quiet:
        for note in verification.notes:
            terminal.say(f"note: {note}")
    with Interrupts() as interrupts:
        for number, combination in enumerate(verification.combinations, start=1):
            display = VerifyDisplay(f"{number}/{total} {combination.title}", sys.stderr, quiet=quiet)
            with display:
                run = verifier.begin(combination)
                follow(run, display, interrupts)
                if interrupts.received is not None:
                    run.finish()
                    break
                compared = verifier.judge(combination, run)
            if not quiet:
                terminal.say(f"{number}/{total} {line_of(compared)}")
    verifier.close()
    if as_json:
        click.echo(json.dumps(to_dict(verification, verifier.compared), indent=2))
    elif verifier.compared:
        print_result(verification, verifier.compared, sys.stdout)
    if interrupts.received is not None:
        raise FtError(
            f"{interrupts.received.name}: {total - len(verifier.compared)} of {total} runs were not compared",
            hint=f"what there is lies in {verification.folder}",
            exit_code=ExitCode.INTERRUPTED,
        )
    return ExitCode.OK if all(item.agrees for item in verifier.compared) else ExitCode.TRAINING
