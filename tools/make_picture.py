"""Run a command in a terminal of 80 columns and keep what it printed as an SVG picture.

    python tools/make_picture.py docs/images/plan.svg ft train examples/quickstart/run.yaml --dry-run

The picture shows what was printed, paths and all: run it in a clone whose place may be read by everybody.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import shlex
import struct
import sys
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 80
ROWS = 60
# Rich's own template fetches its font from the network; a picture in a repository should not.
TEMPLATE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<style>
.{unique_id}-matrix {{ font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: {char_height}px;
  line-height: {line_height}px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
<rect width="{width}" height="{height}" rx="8" fill="#292929"/>
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def printed_by(command: list[str]) -> str:
    """What `command` prints to a terminal of its own; raises `RuntimeError` when it fails."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ.pop("NO_COLOR", None)
        os.environ.pop("CI", None)
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS))
        os.execvp(command[0], command)  # noqa: S606 - the command that the caller typed
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    output = bytearray()
    while True:
        try:
            chunk = os.read(terminal, 65536)
        except OSError:  # Linux reports the end of a pseudo-terminal as an error.
            break
        if not chunk:
            break
        output += chunk
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise RuntimeError(f"{shlex.join(command)} ended with {os.waitstatus_to_exitcode(status)}:\n{output.decode()}")
    return output.decode().replace("\r\n", "\n")


def picture(command: list[str], printed: str) -> str:
    """The SVG of a prompt with `command`, and below it what was `printed`."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {shlex.join(command)}", style="bold"))
    console.print(Text.from_ansi(printed), no_wrap=True)
    return console.export_svg(code_format=TEMPLATE, unique_id="terminal")


def main(argv: list[str]) -> int:
    """Entry point; returns the exit code."""
    if len(argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    target, command = Path(argv[0]), argv[1:]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(picture(command, printed_by(command)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
