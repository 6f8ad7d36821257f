"""Is this process one of torchrun's, or one whose rank somebody set by hand? Pure: the mapping alone."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fleettune_core.errors import ExitCode, FtError
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

_NEEDED = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a RANK needs beside it for the ranks to find each other."""

_SHARED_NAMES = frozenset({"", "none", MEETING_NAME})
"""Rendezvous ids that many runs have in common (`none` is torchrun's default), so no name for a run."""


def detect(env: Environment) -> Detection | None:
    """A rank that torchrun started, a rank set by hand, or None.

    Raises `FtError` (exit code 4) where RANK, or a WORLD_SIZE above 1, says that this is one rank of several, and
    another variable is missing or contradicts it: every such process would otherwise train alone, and say nothing.
    What a group of one left in a shell (WORLD_SIZE=1) is no such word.

    `accelerate launch` and `deepspeed` set the same plain variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) as
    a person does, so they count as set by hand unless torchrun's own are there.
    """
    run_id = env.get("TORCHELASTIC_RUN_ID")
    problem = _problem(env)
    if problem is not None:
        if _is_alone(env):
            return None
        raise FtError(
            f"the environment says that this is one rank of several, but {problem}",
            hint="start the ranks through torchrun or srun, or unset RANK and WORLD_SIZE to let ft start them",
            exit_code=ExitCode.LAUNCH,
        )
    if not env.get("RANK") or (run_id is None and not all(env.get(name) for name in _NEEDED)):
        return None
    process = _process(env, group=None if run_id in _SHARED_NAMES else run_id)
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


def _problem(env: Environment) -> str | None:
    """What keeps the variables from describing a rank, in a sentence; None where they do, or speak of none at all."""
    given = {variable: env[variable].strip() for variable in NUMBERS.values() if env.get(variable, "").strip()}
    if "RANK" not in given and not _several(given.get("WORLD_SIZE", "")):
        return None
    if "RANK" not in given and "SLURM_PROCID" in env:
        return None  # Scripts for srun set WORLD_SIZE and MASTER_ADDR, and leave the rank to SLURM.
    odd = [f"{variable}={text} is no number" for variable, text in given.items() if not _is_number(text)]
    if odd:
        return odd[0]
    numbers = {name: int(given[variable]) for name, variable in NUMBERS.items() if variable in given}
    rank, world_size = numbers.get("rank"), numbers.get("world_size")
    if rank is not None and world_size is not None and rank >= world_size:
        return f"RANK={rank} and WORLD_SIZE={world_size} contradict each other"
    missing = [name for name in ("RANK", *_NEEDED) if not env.get(name, "").strip()]
    if missing:
        told = " ".join(f"{name}={given[name]}" for name in ("RANK", "WORLD_SIZE") if name in given)
        return f"beside {told} there is no {' and no '.join(missing)}"
    world_size = numbers["world_size"]
    local_world_size = numbers.get("local_world_size", world_size)
    if not 1 <= local_world_size <= world_size:
        return f"LOCAL_WORLD_SIZE={local_world_size} and WORLD_SIZE={world_size} contradict each other"
    local_rank = numbers.get("local_rank", 0)
    if local_rank >= local_world_size:
        of = "LOCAL_WORLD_SIZE" if "local_world_size" in numbers else "WORLD_SIZE"
        return f"LOCAL_RANK={local_rank} and {of}={local_world_size} contradict each other"
    return None


def _is_alone(env: Environment) -> bool:
    """Whether this is the one rank of a group of one, as far as RANK and WORLD_SIZE tell."""
    world_size, rank = env.get("WORLD_SIZE", "").strip(), env.get("RANK", "").strip()
    return _is_number(world_size) and int(world_size) == 1 and (not rank or (_is_number(rank) and int(rank) == 0))


def _several(text: str) -> bool:
    return _is_number(text) and int(text) > 1


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _process(env: Environment, *, group: str | None) -> ProcessInfo:
    """The rank that the variables describe, which `_problem` has nothing against.

    Without LOCAL_WORLD_SIZE all ranks are taken to be on this machine; without LOCAL_RANK they are dealt to the
    machines in blocks.
    """
    numbers = {name: int(env[variable]) for name, variable in NUMBERS.items() if env.get(variable, "").strip()}
    rank, world_size = numbers["rank"], numbers["world_size"]
    local_world_size = numbers.get("local_world_size", world_size)
    local_rank = numbers.get("local_rank", rank % local_world_size)
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
