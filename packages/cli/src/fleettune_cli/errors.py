"""How a command ends when something is wrong: what you gave, what is wrong, what to type; then the exit code.

A user's mistake is one line and a hint. A traceback is shown only for a fault of Fleettune itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click
from click.exceptions import Abort, Exit, NoArgsIsHelpError

from fleettune_cli import terminal
from fleettune_cli.words import fold, words_typed
from fleettune_core.errors import ExitCode, FtError, nearest
from fleettune_core.masking import mask_tokens


def guard(run: Callable[[], Any]) -> int:
    """Call `run` and return the exit code: its own if it returned an int, otherwise by what it raised."""
    try:
        result = run()
        # What is still in the buffer fails here, and not while the interpreter shuts down.
        sys.stdout.flush()
    except Exit as request:
        return int(request.exit_code)
    except NoArgsIsHelpError as error:
        print(error.message.rstrip(), file=sys.stderr)
        return ExitCode.USAGE
    except click.ClickException as error:
        return show(from_click(error))
    except FtError as error:
        return show(error)
    except (KeyboardInterrupt, EOFError, Abort):
        terminal.say("interrupted")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        _close_stdout()
        return ExitCode.OK
    except OSError as error:
        return show_system_error(error)
    except Exception as error:  # noqa: BLE001 - the last resort of the command line
        return show_fault(error)
    return int(result) if isinstance(result, int) else ExitCode.OK


def show(error: FtError) -> int:
    """Print a user's mistake on stderr; returns its exit code."""
    stream = sys.stderr
    terminal.say(f"{terminal.styled('error:', stream, fg='red', bold=True)} {error.message}")
    for problem in error.problems:
        terminal.say(f"  {problem}")
    if error.hint:
        terminal.say(f"{terminal.styled('hint:', stream, fg='cyan', bold=True)} {error.hint}")
    return int(error.exit_code)


def show_system_error(error: OSError) -> int:
    """Print what the system refused (a full disk, a folder that is gone) in one line; returns the exit code."""
    what = mask_tokens(error.strerror or str(error) or type(error).__name__)
    place = f" {error.filename}:" if error.filename is not None else ""
    if not _can_write(sys.stdout):
        _close_stdout()
    if error.filename is None and not _has_folder():
        place = " the current folder:"
    return show(FtError(f"the system refused:{place} {what}", exit_code=ExitCode.TRAINING))


def _can_write(stream: Any) -> bool:
    try:
        stream.flush()
    except (OSError, ValueError, AttributeError):
        return False
    return True


def _has_folder() -> bool:
    from pathlib import Path

    try:
        Path.cwd()
    except OSError:
        return False
    return True


def show_fault(error: Exception) -> int:
    """Print a fault of ours with its traceback; returns the exit code."""
    import traceback

    told = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    print(mask_tokens(told), end="", file=sys.stderr)
    head = terminal.styled("error:", sys.stderr, fg="red", bold=True)
    terminal.say(f"{head} this is a fault of Fleettune, not yours: {type(error).__name__}: {mask_tokens(str(error))}")
    terminal.say("hint: report it with the lines above and the output of `ft --version`")
    return int(ExitCode.TRAINING)


def unknown_command(ctx: click.Context, name: str, valid: Iterable[str]) -> FtError:
    """`ft trian`: no such command, with the nearest one."""
    names = list(valid)
    close = nearest(name, names)
    hint = f"did you mean `{ctx.command_path} {close[0]}`?" if close else f"commands: {', '.join(names)}"
    return FtError(f"`{ctx.command_path} {name}`: no such command", hint=hint, exit_code=ExitCode.USAGE)


def from_click(error: click.ClickException) -> FtError:
    """A mistake on the command line, as Click found it, in our form."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "ft"
    see_help = f"`{path} --help` lists the options"
    if isinstance(error, click.NoSuchOption):
        return unknown_option(error, context)
    if isinstance(error, click.BadOptionUsage):
        option = _option(context, error.option_name)
        if option is not None and getattr(option, "is_flag", False):
            spellings = " or ".join((option.opts[0], *option.secondary_opts[:1]))
            return _usage(f"{error.option_name} is a switch and takes no value", f"write {spellings}")
        metavar = option.make_metavar(context) if option is not None and context is not None else "VALUE"
        return _usage(f"{error.option_name} needs a value", f"write {error.option_name} {metavar}")
    if isinstance(error, click.MissingParameter):
        name = error.param.human_readable_name if error.param is not None else "an argument"
        return _usage(f"`{path}` needs {name}", f"`{path} --help` shows how it is used")
    if isinstance(error, click.BadParameter):
        return _usage(error.format_message().rstrip("."), see_help)
    if isinstance(error, click.UsageError):
        return _usage(error.format_message().rstrip("."), see_help)
    return FtError(error.format_message(), exit_code=ExitCode.USAGE)


def unknown_option(error: click.NoSuchOption, context: click.Context | None) -> FtError:
    """An unknown option as it was typed, with the nearest one, or where else its meaning may be found."""
    path = context.command_path if context is not None else "ft"
    typed = error.option_name
    valid: list[str] = []
    hints: Mapping[str, str] = {}
    if context is not None:
        wanted = fold(typed)
        for word in words_typed(context):
            name = word.partition("=")[0]
            if fold(name) == wanted or (len(typed) == 2 and name.startswith(typed)):
                typed = name
                break
        valid = [
            name
            for parameter in context.command.get_params(context)
            if isinstance(parameter, click.Option) and not parameter.hidden
            for name in (*parameter.opts, *parameter.secondary_opts)
            if name.startswith("--")
        ]
        hints = getattr(context.command, "unknown_option_hints", None) or {}
    bare = fold(typed.lstrip("-"))
    # An exact name behind one dash (`-lora`) is the nearest there can be.
    close = [f"--{bare}"] if f"--{bare}" in valid else [f"--{name}" for name in nearest(bare, [v[2:] for v in valid])]
    hint = hints.get(bare.replace("-", "_"))
    if hint is None:
        hint = f"did you mean {close[0]}?" if close else f"`{path} --help` lists the options"
    return _usage(f"`{path}` has no option {typed}", hint)


def _usage(message: str, hint: str) -> FtError:
    return FtError(message, hint=hint, exit_code=ExitCode.USAGE)


def _option(context: click.Context | None, name: str) -> click.Option | None:
    if context is None:
        return None
    for parameter in context.command.get_params(context):
        if isinstance(parameter, click.Option) and name in (*parameter.opts, *parameter.secondary_opts):
            return parameter
    return None


def _close_stdout() -> None:
    """The reader of stdout is gone (`ft … | head`): keep the interpreter from complaining about it on exit."""
    import os

    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
