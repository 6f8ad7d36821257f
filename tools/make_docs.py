"""Write the generated parts of docs/: hooks (hooks.md), settings (run-file.md), help pages (cli.md).

    python tools/make_docs.py            writes them
    python tools/make_docs.py --check    says what would change; exit code 1 when anything would

A generated part stands between `<!-- generated: NAME -->` and `<!-- end: NAME -->`; the rest is written by hand.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
HELP_COLUMNS = 100


def hooks_page() -> str:
    """Every hook in the order of its declaration: its signature, how it is called, its text."""
    return "\n".join(hook_section(name, hook) for name, hook in hooks())


def hooks() -> Iterator[tuple[str, Callable[..., object]]]:
    """The declared hooks, in the order of the source."""
    from fleettune_core import hookspecs

    marked = {name: member for name, member in vars(hookspecs).items() if hasattr(member, f"{hookspecs.PROJECT}_spec")}
    yield from sorted(marked.items(), key=lambda item: item[1].__code__.co_firstlineno)


def signature(name: str, hook: Callable[..., object]) -> str:
    """`name(argument: Type) -> Type`, exactly as it is declared."""
    return f"{name}{inspect.signature(hook)}".replace("'", "")


def hook_section(name: str, hook: Callable[..., object]) -> str:
    """One hook as Markdown."""
    from fleettune_core.hookspecs import PROJECT

    first = getattr(hook, f"{PROJECT}_spec")["firstresult"]
    called = "The one owner's answer counts (`firstresult`)." if first else "Every plugin is asked."
    return f"### `{name}`\n\n```python\n{signature(name, hook)}\n```\n\n{inspect.getdoc(hook)}\n\n{called}\n"


def cli_page() -> str:
    """The help page of every command, as `ft` prints it at a fixed width."""
    return "\n".join(f"## `{' '.join(['ft', *path])}`\n\n```text\n{help_text(path)}\n```\n" for path in command_paths())


def command_paths() -> Iterator[tuple[str, ...]]:
    """Every command that is not hidden, depth first; the empty path is `ft` itself."""
    import click

    from fleettune_cli.main import cli

    def walk(command: click.Command, path: tuple[str, ...], context: click.Context) -> Iterator[tuple[str, ...]]:
        yield path
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                if child is not None and not child.hidden:
                    yield from walk(child, (*path, name), click.Context(child, info_name=name, parent=context))

    assert isinstance(cli, click.Group)
    yield from walk(cli, (), click.Context(cli, info_name="ft"))


def help_text(path: tuple[str, ...]) -> str:
    """What `ft PATH --help` prints: in a process of its own, so that nothing of this one shows."""
    quiet = {"COLUMNS": str(HELP_COLUMNS), "NO_COLOR": "1", "TERM": "dumb", "LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"}
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | quiet
    command = [sys.executable, "-m", "fleettune_cli", *path, "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines())


def settings_page() -> str:
    """Every setting of the run file, section by section."""
    from fleettune_core.config.schema import SECTIONS, RunConfig

    parts = [settings_table("At the top", RunConfig)]
    parts += [settings_table(f"`{section}:`", owner) for section, owner in SECTIONS.items()]
    return "\n".join(parts)


def settings_table(heading: str, owner: type) -> str:
    """The settings of one section as a table."""
    from fleettune_core.config.fields import settings_of

    lines = [f"### {heading}", "", "| setting | flag | default | |", "| --- | --- | --- | --- |"]
    for setting in settings_of(owner):
        flags = ", ".join(f"`{flag}`" for flag in setting.flags)
        default = "" if setting.default is None else f"`{json.dumps(setting.default)}`"
        choices = f" One of {', '.join(f'`{choice}`' for choice in setting.choices)}." if setting.choices else ""
        lines.append(f"| `{setting.name}` | {flags} | {default} | {setting.help}{choices} |".replace("  ", " "))
    return "\n".join([*lines, ""])


PARTS: Mapping[str, tuple[str, Callable[[], str]]] = {
    "hooks": ("hooks.md", hooks_page),
    "settings": ("run-file.md", settings_page),
    "cli": ("cli.md", cli_page),
}


def replace_part(text: str, name: str, part: str) -> str:
    """`text` with its generated part `name` made anew; ValueError when the marks are not there."""
    start, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
    pattern = re.compile(re.escape(start) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"no {start} … {end}")
    return pattern.sub(lambda _: f"{start}\n\n{part}\n{end}", text)


def stale_pages() -> Iterator[tuple[Path, str]]:
    """Pages whose generated part is not what it would be now, with their new text."""
    for name, (file, make) in PARTS.items():
        page = DOCS / file
        text = page.read_text(encoding="utf-8")
        fresh = replace_part(text, name, make())
        if fresh != text:
            yield page, fresh


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing, only say what would change")
    check = parser.parse_args(argv).check
    stale = list(stale_pages())
    for page, text in stale:
        print(f"{'stale' if check else 'written'}: docs/{page.name}")
        if not check:
            page.write_text(text, encoding="utf-8")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
