"""What a plan says to its reader, in order, before any rendering: pure, so that tests can compare whole pages."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleettune_cli.units import format_bytes, format_count, format_value
from fleettune_core.config.known import settings_by_path
from fleettune_core.config.schema import to_dict
from fleettune_core.masking import MASK, is_secret
from fleettune_core.plan.model import Choice, Plan
from fleettune_core.types import DeviceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the page: what, the decision, why; and parts of it below."""

    label: str
    text: str
    reason: str = ""
    parts: tuple[tuple[str, str], ...] = ()
    """Pairs (what, detail)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPage:
    """A whole page."""

    title: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    command: tuple[str, ...]
    """The argv, or empty when nothing is launched."""
    explained: tuple[tuple[str, str, str], ...] = ()
    """Every value as (path, value, source and what it beat); empty unless asked for."""


def plan_page(plan: Plan, *, explain: bool = False) -> PlanPage:
    """The page of a plan; `explain` adds every value with its source."""
    launch = plan.launch
    return PlanPage(
        title=f"plan of {plan.run_id}",
        rows=tuple(_rows(plan, explain=explain)),
        notes=(*plan.notes, *(launch.notes if launch else ())),
        warnings=plan.warnings,
        command=launch.argv if launch else (),
        explained=tuple(_explained(plan)) if explain else (),
    )


def shell_lines(argv: tuple[str, ...], width: int) -> list[str]:
    """`argv` as a shell command that can be copied: cut between words only, with a backslash at each cut."""
    lines: list[str] = []
    line = ""
    for word in map(shlex.quote, argv):
        if line and len(line) + 1 + len(word) + 2 > width:
            lines.append(line + " \\")
            line = "  " + word
        else:
            line = f"{line} {word}" if line else word
    return [*lines, line] if line else lines


def _rows(plan: Plan, *, explain: bool) -> Iterator[Row]:
    yield Row(label="folder", text=_near(plan.run_dir))
    yield _chosen("launcher", plan.launcher)
    yield _chosen("backend", plan.backend)
    yield Row(label="layout", text=str(plan.layout), reason=_devices(plan))
    yield _batch(plan)
    yield Row(label="precision", text=plan.precision.name, reason=plan.precision.reason)
    yield Row(label="threads", text=f"{plan.threads_per_rank} per rank", reason=f"{plan.devices.cpu_cores} cores")
    yield _model(plan)
    yield _memory(plan)
    yield _data(plan)
    overridden = tuple(_overridden(plan))
    if overridden:
        yield Row(label="overridden", text=overridden[0][1], parts=overridden[1:])
    if plan.process is not None:
        rank = f"rank {plan.process.rank} of {plan.process.world_size}"
        yield Row(label="process", text=rank, reason="this process already is a rank, so nothing is launched")
    if plan.launch is not None and plan.launch.environment:
        words = [f"{name}={shlex.quote(value)}" for name, value in sorted(plan.launch.environment.items())]
        yield Row(label="environment", text=" ".join(words))
    if explain and plan.launch is not None and plan.launch.unset:
        yield Row(label="unset", text=" ".join(plan.launch.unset))
    if plan.launch is not None and plan.launch.files:
        yield Row(label="files", text=", ".join(file.path for file in plan.launch.files))


def _chosen(label: str, choice: Choice) -> Row:
    text = f"{choice.name} [{choice.distribution}]" if choice.distribution else choice.name
    return Row(label=label, text=text, reason=choice.reason)


def _devices(plan: Plan) -> str:
    devices = plan.devices
    if devices.kind is DeviceKind.CPU:
        return f"on CPU: {devices.name}"
    return f"this machine has {devices.count} × {devices.name}"


def _batch(plan: Plan) -> Row:
    batch = plan.batch
    numbers = {
        "global_batch": f"{batch.global_batch} rows",
        "micro_batch": f"{batch.micro_batch} per micro-batch",
        "accumulation": f"{batch.accumulation} accumulation",
        "ranks": f"{batch.ranks} {'rank' if batch.ranks == 1 else 'ranks'}",
    }
    parts = tuple((text, batch.reasons[name]) for name, text in numbers.items() if name in batch.reasons)
    return Row(label="batch", text=str(batch), parts=parts)


def _model(plan: Plan) -> Row:
    model = plan.config.model
    text = _near(model.model)
    lora = ""
    if model.lora:
        alpha = f", alpha {model.lora_alpha:g}" if model.lora_alpha is not None else ""
        lora = f"LoRA r {model.lora_r}{alpha} on {model.lora_target or 'all-linear'}"
    if plan.memory is None:
        return Row(label="model", text=text, reason=lora or "all weights are trained")
    total, trained = plan.memory.parameters, plan.memory.trainable
    share = f"{format_count(trained)} trained ({100 * trained / total:.3g} %)" if trained != total else "all trained"
    parts = (f"{format_count(total)} parameters", share, lora)
    return Row(label="model", text=text, reason=", ".join(filter(None, parts)))


def _memory(plan: Plan) -> Row:
    memory = plan.memory
    if memory is None:
        return Row(label="memory", text="not estimated", reason=plan.memory_unknown or "")
    # On a CPU host the ranks of this machine share one memory; a GPU belongs to one rank.
    sharers = plan.layout.procs_per_node if plan.devices.kind is DeviceKind.CPU else 1
    available = plan.devices.memory_bytes
    share = 100 * memory.total * sharers / available if available else 0.0
    shared = f" for {sharers} ranks" if sharers > 1 else ""
    sizes = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "logits": memory.logits,
    }
    return Row(
        label="memory",
        text=f"{format_bytes(memory.total)} per rank of {format_bytes(available)}{shared} ({share:.0f} %)",
        reason="; ".join(memory.assumptions),
        parts=tuple((name, format_bytes(size)) for name, size in sizes.items()),
    )


def _data(plan: Plan) -> Row:
    if plan.data is None:
        return Row(label="data", text=_near(plan.config.data.dataset))
    seen = plan.data
    rows = "" if seen.rows is None else f", {seen.rows:,} rows{'' if seen.complete else ' seen so far'}"
    files = f" in {len(seen.files)} files" if len(seen.files) > 1 else ""
    return Row(label="data", text=f"{_near(plan.config.data.dataset)}: {seen.format}{rows}{files}", reason=seen.reason)


def _near(place: str | Path | None) -> str:
    """A path below the current folder without that folder; anything else as it is."""
    path = Path(str(place))
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else str(place)


def _overridden(plan: Plan) -> Iterator[tuple[str, str]]:
    values = dict(_flat(to_dict(plan.config)))
    for path, source in plan.sources.items():
        name = path.rpartition(".")[2]
        for where, value in source.beat:
            won = "" if path not in values else f" {_shown(path, values[path])}"
            yield "", f"{source.where}{won} beats {where} ({name}: {_shown(path, value)})"


def _explained(plan: Plan) -> Iterator[tuple[str, str, str]]:
    settings = settings_by_path()
    for path, value in _flat(to_dict(plan.config)):
        source = plan.sources.get(path)
        decided = path in settings and value != settings[path].default
        where = source.where if source is not None else "the plan" if decided else "default"
        if source is not None and source.beat:
            where += ", beats " + ", ".join(f"{loser} ({_shown(path, lost)})" for loser, lost in source.beat)
        yield path, _shown(path, value), where


def _shown(path: str, value: Any) -> str:
    return MASK if value is not None and is_secret(path, value) else format_value(value)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
