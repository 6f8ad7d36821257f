"""How many processes on how many machines: from what was said, and from what there is."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fleettune_core.config.source import LoadedConfig, Source
from fleettune_core.errors import ExitCode, FtError
from fleettune_core.types import BatchPlan, DeviceKind, Devices, Layout, ProcessInfo

ON_THIS_MACHINE = frozenset({"local", "torchrun"})
"""Launchers whose processes run where `ft` is typed, so that this machine's devices are the limit."""


MOST_PROCESSES_PER_CORE = 64
"""On a machine without GPUs. Far beyond what is sensible, and far below what a typing error asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedLayout:
    """A layout, and what to say about it."""

    layout: Layout
    reason: str
    """Where the number of ranks comes from, for the batch equation."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def exit_code_for(source: Source) -> ExitCode:
    """Whether a wrong value is the run file's fault or the command line's."""
    return ExitCode.CONFIG if source.kind == "file" else ExitCode.USAGE


def parse_nodes(loaded: LoadedConfig) -> tuple[int, int]:
    """(min, max) of `launch.nodes`: `2`, or `1:4` for an elastic run. Raises `FtError`."""
    text = loaded.config.launch.nodes
    if text is None:
        return 1, 1
    match = re.fullmatch(r"\s*([0-9]+)\s*(?::\s*([0-9]+)\s*)?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        source = loaded.source("launch.nodes")
        raise FtError(
            f"{source.where}: nodes is {text!r}, which is neither a number of machines nor MIN:MAX",
            hint="write --nodes 2, or --nodes 1:4 for a run that may grow and shrink",
            exit_code=exit_code_for(source),
        )
    return least, most


def solve_layout(
    loaded: LoadedConfig, *, nodes: tuple[int, int], devices: Devices, launcher: str, process: ProcessInfo | None
) -> SolvedLayout:
    """The layout: of the ranks that exist when this process is one of them, else what was asked for, else a process
    per device. Raises `FtError` for more processes than GPUs, and for numbers that contradict the existing ranks."""
    if process is not None:
        return _existing(loaded, nodes, process)
    said = loaded.config.launch.nproc_per_node
    where = loaded.source("launch.nproc_per_node").where
    on_gpu = devices.kind is DeviceKind.CUDA
    default = devices.count if on_gpu and launcher != "local" else 1
    procs = said if said is not None else default
    notes: list[str] = []
    warnings: list[str] = []
    if launcher in ON_THIS_MACHINE:
        if on_gpu and procs > devices.count:
            raise FtError(
                f"{where} asks for {procs} processes, and this machine has"
                f" {devices.count} GPU{'s' if devices.count > 1 else ''} ({devices.name})",
                hint=f"--nproc-per-node {devices.count}: one process drives one GPU",
                exit_code=exit_code_for(loaded.source("launch.nproc_per_node")),
            )
        if on_gpu and procs < devices.count:
            notes.append(f"{procs} of this machine's {devices.count} GPUs are used")
        if not on_gpu and procs > MOST_PROCESSES_PER_CORE * devices.cpu_cores:
            raise FtError(
                f"{where} asks for {procs} processes, and this machine has {devices.cpu_cores} CPU cores",
                hint=f"at most {MOST_PROCESSES_PER_CORE} processes a core are started: --nproc-per-node"
                f" {devices.cpu_cores} is one on each",
                exit_code=exit_code_for(loaded.source("launch.nproc_per_node")),
            )
        if not on_gpu and procs > devices.cpu_cores:
            warnings.append(f"{procs} processes share {devices.cpu_cores} CPU cores: they will be slower than fewer")
    per_node = f"{procs} per node" if nodes[1] > 1 else f"{procs} process{'es' if procs > 1 else ''}"
    why = where if said is not None else ("one per GPU" if on_gpu and default > 1 else "default")
    reason = f"{per_node}: {why}"
    if nodes[1] > 1:
        reason = f"{nodes[1]} nodes: {loaded.source('launch.nodes').where}, {reason}"
    layout = Layout(min_nodes=nodes[0], max_nodes=nodes[1], procs_per_node=procs)
    return SolvedLayout(layout=layout, reason=reason, notes=tuple(notes), warnings=tuple(warnings))


def batch_is_told(loaded: LoadedConfig, *, nodes_known: bool) -> bool:
    """Whether the batch that was said can be judged: no number of it is a mistake already.

    A global batch that cannot be dealt to the ranks of one machine cannot be dealt to those of several; but three
    numbers that contradict each other on one may agree on several, where nobody knows how many were meant.
    """
    if any(path.startswith("batch.") for path in loaded.wrong):
        return False
    said = loaded.config.batch
    micro = said.micro_batch or said.per_device_train_batch_size
    return nodes_known or not (said.global_batch and micro and said.gradient_accumulation_steps)


def elastic_warnings(layout: Layout, batch: BatchPlan) -> list[str]:
    """Sizes of an elastic run at which its global batch cannot be dealt: a group of that size would end."""
    sizes = range(layout.min_nodes, layout.max_nodes + 1)
    bad = [nodes for nodes in sizes if batch.global_batch % (nodes * layout.procs_per_node)]
    if not bad:
        return []
    rows, counts = batch.global_batch, " or ".join(map(str, bad))
    return [f"{rows} rows cannot be dealt to {counts} nodes × {layout.procs_per_node}: the run would end at that size"]


def _existing(loaded: LoadedConfig, nodes: tuple[int, int], process: ProcessInfo) -> SolvedLayout:
    """The layout that this rank is part of. Numbers that were given must agree with it."""
    launch = loaded.config.launch
    problems: list[str] = []
    codes: set[ExitCode] = set()
    if launch.nproc_per_node not in (None, process.local_world_size):
        source = loaded.source("launch.nproc_per_node")
        problems.append(f"{source.where}: {launch.nproc_per_node} processes per node, but {process.local_world_size}")
        codes.add(exit_code_for(source))
    if launch.nodes is not None and not nodes[0] <= process.num_nodes <= nodes[1]:
        source = loaded.source("launch.nodes")
        problems.append(f"{source.where}: {launch.nodes} nodes, but {process.num_nodes}")
        codes.add(exit_code_for(source))
    if problems:
        raise FtError(
            f"this process already is rank {process.rank} of {process.world_size}, and what was asked for is another"
            " layout than the one that runs",
            problems=problems,
            hint="leave these out: the layout is what the launcher made",
            exit_code=ExitCode.CONFIG if ExitCode.CONFIG in codes else ExitCode.USAGE,
        )
    layout = Layout(min_nodes=process.num_nodes, max_nodes=process.num_nodes, procs_per_node=process.local_world_size)
    return SolvedLayout(layout=layout, reason=f"this process is rank {process.rank} of {process.world_size}")
