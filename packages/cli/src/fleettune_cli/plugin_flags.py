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
    PluginFlag(
        flag="--zero-stage",
        path="backend.zero_stage",
        plugin="deepspeed",
        metavar="0|1|2|3",
        help="deepspeed: what is divided: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too. Default: 2.",
    ),
    PluginFlag(
        flag="--offload-optimizer",
        path="backend.offload_optimizer",
        plugin="deepspeed",
        choices=("none", "cpu", "nvme"),
        help="deepspeed: keep optimizer state in the machine's memory, or on a disk. Default: none.",
    ),
    PluginFlag(
        flag="--offload-params",
        path="backend.offload_params",
        plugin="deepspeed",
        choices=("none", "cpu", "nvme"),
        help="deepspeed: keep weights in the machine's memory, or on a disk; stage 3 alone. Default: none.",
    ),
    PluginFlag(
        flag="--nvme-path",
        path="backend.nvme_path",
        plugin="deepspeed",
        metavar="DIR",
        help="deepspeed: folder on the disk that nvme offloads to.",
    ),
    PluginFlag(
        flag="--deepspeed-config",
        path="backend.deepspeed_config",
        plugin="deepspeed",
        metavar="FILE",
        help="deepspeed: a JSON that is merged over what follows from the plan.",
    ),
    PluginFlag(
        flag="--shard-group",
        path="backend.shard_group",
        plugin="fsdp",
        metavar="N",
        help="fsdp: divide over groups of N ranks that are copies of each other. Default: all ranks are one group.",
    ),
)
