"""Is this process one of torchrun's, or one whose rank somebody set by hand? Pure: the mapping alone."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fleettune_core.types import Detection, Environment, ProcessInfo, Score
from fleettune_launcher_torchrun.argv import MEETING_NAME

NUMBERS: Mapping[str, str] = MappingProxyType(
    {
        "rank": "RANK",
        "local_rank": "LOCAL_RANK",
        "world_size": "WORLD_SIZE",
        "local_world_size": "LOCAL_WORLD_SIZE",
        "node_rank": "GROUP_RANK",
        "master_port": "MASTER_PORT",
        "restart_count": "TORCHELASTIC_RESTART_COUNT",
    }
)
"""Field of `ProcessInfo` -> environment variable that torchrun sets for each worker."""

_SHARED_NAMES = frozenset({"", "none", MEETING_NAME})
"""Rendezvous ids that many runs have in common (`none` is torchrun's default), so no name for a run."""


def detect(env: Environment) -> Detection | None:
    """A rank that torchrun started, a rank set by hand, or None: also where the numbers contradict each other.

    `accelerate launch` and `deepspeed` set the same plain variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) as
    a person does, so they count as set by hand unless torchrun's own are there.
    """
    if "RANK" not in env:
        return None
    run_id = env.get("TORCHELASTIC_RUN_ID")
    if run_id is None and not all(name in env for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return None
    process = _process(env, group=None if run_id in _SHARED_NAMES else run_id)
    if process is None:
        return None
    rank = f"rank {process.rank} of {process.world_size}"
    if run_id is not None:
        return Detection(score=Score.STARTED_BY_INNER, reason=f"torchrun started this as {rank}", process=process)
    # Inside a SLURM task the variables were set after SLURM had set its own, so they are the closer word.
    inner = "SLURM_PROCID" in env
    return Detection(
        score=Score.STARTED_BY_INNER if inner else Score.STARTED_BY,
        reason=f"RANK and WORLD_SIZE are set: this is {rank}, by hand or by another launcher",
        process=process,
    )


def _process(env: Environment, *, group: str | None) -> ProcessInfo | None:
    """The rank that the variables describe, or None when they describe none that can exist.

    Without LOCAL_WORLD_SIZE all ranks are taken to be on this machine; without LOCAL_RANK they are dealt to the
    machines in blocks.
    """
    numbers: dict[str, int] = {}
    for name, variable in NUMBERS.items():
        if variable in env:
            text = env[variable].strip()
            if not (text.isascii() and text.isdecimal()):
                return None
            numbers[name] = int(text)
    rank, world_size = numbers.get("rank"), numbers.get("world_size")
    if rank is None or world_size is None or rank >= world_size:
        return None
    local_world_size = numbers.get("local_world_size", world_size)
    if not 1 <= local_world_size <= world_size:
        return None
    local_rank = numbers.get("local_rank", rank % local_world_size)
    if local_rank >= local_world_size:
        return None
    return ProcessInfo(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=numbers.get("node_rank", rank // local_world_size),
        master_addr=env.get("MASTER_ADDR"),
        master_port=numbers.get("master_port"),
        restart_count=numbers.get("restart_count", 0),
        group=group,
    )
