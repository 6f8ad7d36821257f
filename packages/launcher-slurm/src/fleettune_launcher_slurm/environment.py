"""What SLURM made of this process: a task of an `srun`, a job, or nothing. Pure: the mapping alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from fleettune_core.types import Detection, Environment, ProcessInfo, Score
from fleettune_launcher_slurm.hostlist import first_host

NUMBERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "job": ("SLURM_JOB_ID", "SLURM_JOBID"),
        "step": ("SLURM_STEP_ID", "SLURM_STEPID"),
        "rank": ("SLURM_PROCID",),
        "local_rank": ("SLURM_LOCALID",),
        "world_size": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        "node_rank": ("SLURM_NODEID",),
        "num_nodes": ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        "restart_count": ("SLURM_RESTART_COUNT",),
    }
)
"""What we want to know -> the variables that tell it, the step's own before the job's (srun(1), sbatch(1))."""

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Steps from here on are no `srun` of the user: 4294967291 is the batch script, 4294967290 an interactive shell
(`SLURM_BATCH_SCRIPT`, `SLURM_INTERACTIVE_STEP` in slurm.h)."""

_PORT_BASE, _NUM_PORTS = 20_000, 10_000
"""Below the ports that Linux hands out itself (32768 and up)."""


def detect(env: Environment) -> Detection | None:
    """A task of an `srun` is a rank; anything else is nothing.

    A batch script also carries SLURM_PROCID=0 and the whole job's SLURM_NTASKS, and is no rank: its step is not an
    `srun`'s. A job, or a machine with `sbatch`, is not told of: this version cannot launch there, and an offer that
    ends in a refusal helps nobody.
    """
    numbers = _read(env)
    job = numbers.get("job")
    if job is None:
        return None
    process = _task(env, numbers, job)
    if process is None:
        return None
    return Detection(
        score=Score.STARTED_BY,
        reason=f"srun started this as rank {process.rank} of {process.world_size} in SLURM job {job}",
        process=process,
    )


def _read(env: Environment) -> dict[str, int]:
    """The numbers that are there and are numbers."""
    found: dict[str, int] = {}
    for name, variables in NUMBERS.items():
        for variable in variables:
            text = env.get(variable, "").strip()
            if text.isascii() and text.isdecimal():
                found[name] = int(text)
                break
    return found


def _task(env: Environment, numbers: Mapping[str, int], job: int) -> ProcessInfo | None:
    step, rank, world_size = numbers.get("step"), numbers.get("rank"), numbers.get("world_size")
    if step is None or step >= _FIRST_SPECIAL_STEP or rank is None or world_size is None or rank >= world_size:
        return None
    node_rank, num_nodes = numbers.get("node_rank", 0), numbers.get("num_nodes", 1)
    local_world_size = _tasks_of_node(env, node_rank) or max(1, world_size // max(1, num_nodes))
    local_rank = numbers.get("local_rank")
    if local_rank is None or local_rank >= local_world_size or local_world_size > world_size:
        return None
    return ProcessInfo(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=node_rank,
        master_addr=_master_addr(env, num_nodes),
        # Every rank computes the same port, and two steps on one node get different ones.
        master_port=_PORT_BASE + (job * 101 + step) % _NUM_PORTS,
        restart_count=numbers.get("restart_count", 0),
        group=f"slurm-{job}.{step}",
    )


def _master_addr(env: Environment, num_nodes: int) -> str | None:
    """Rank 0 is on the first node of the step's list. On one node no name needs to resolve."""
    if num_nodes == 1:
        return "127.0.0.1"
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or ""
    return first_host(nodes)


def _tasks_of_node(env: Environment, node_rank: int) -> int | None:
    """Tasks on one node, from SLURM's run-length form: `2(x3),1` is 2, 2, 2, 1."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or ""
    node = 0
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return None
        node += int(match[2] or 1)
        if node_rank < node:
            return int(match[1])
    return None
