"""Flags for options of first-party plugins: a small table, so that building the command line imports no plugin.

Options of any other plugin are said with `--set backend.NAME=VALUE` or in the run file. A test keeps this table equal
to what the plugins declare.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginFlag:
    """One plugin option that has a flag of its own."""

    flag: str
    path: str
    """Dotted path of the run file."""
    plugin: str
    """The plugin that reads it."""
    help: str
    choices: tuple[str, ...] = ()
    metavar: str | None = None


PLUGIN_FLAGS: tuple[PluginFlag, ...] = (
    PluginFlag(
        flag="--join-timeout-seconds",
        path="launch.join_timeout_seconds",
        plugin="torchrun",
        metavar="N",
        help="torchrun: how long a machine waits for the others, in seconds. Default: 300.",
    ),
    PluginFlag(
        flag="--last-call-seconds",
        path="launch.last_call_seconds",
        plugin="torchrun",
        metavar="N",
        help="torchrun: how long an elastic run that has enough machines waits for more, in seconds. Default: 30.",
    ),
    PluginFlag(
        flag="--local-addr",
        path="launch.local_addr",
        plugin="torchrun",
        metavar="ADDRESS",
        help="torchrun: address of this machine that the others reach. Default: its host name.",
    ),
    PluginFlag(
        flag="--rdzv-id",
        path="launch.rdzv_id",
        plugin="torchrun",
        metavar="NAME",
        help="torchrun: name under which the machines meet, the same on each. Default: fleettune.",
    ),
    PluginFlag(
        flag="--grad-compression",
        path="backend.grad_compression",
        plugin="ddp",
        choices=("none", "bf16", "powersgd"),
        help="ddp: compress gradients between ranks. It changes the numbers between layouts. Default: none.",
    ),
)
