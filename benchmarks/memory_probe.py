"""An extension that measures live tensor bytes in a training, without a change in the product.

It stands around the hooks of the chosen backend and writes `memory.rank<k>.json` into the run folder: for every mark
(around the wrapping and around every micro-batch) the bytes of tensors that were live there, and the most since the
mark before. On a GPU these are the allocator's own counters, on a CPU those of `tensor_meter.c`. The interpreter, its
libraries and the heap's holes are left out, as they are in the estimate; the resident set is written beside it.
"""

from __future__ import annotations

import ctypes
import json
import resource
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import torch

from fleettune_core.hookspecs import hookimpl
from fleettune_core.training.metrics import state_bytes
from fleettune_core.types import DeviceKind, ReduceGate, TrainingContext, TrainingRun, WrappedModel

STEPS_MEASURED = 2
"""From the second step on there is optimizer state from the beginning. The run needs one step more."""


class MemoryProbe:
    """Wraps three hooks; see the module's text."""

    def __init__(self) -> None:
        self._meter: _Meter | None = None
        self._marks: list[dict[str, Any]] = []
        self._optimizer: Any = None
        self._steps = 0
        self._micro_batch = 0
        self._mapped_bytes = 0
        self._resident_before_bytes = 0

    @hookimpl(wrapper=True)
    def configure_training(self, run: TrainingRun) -> Generator[None, Any, Any]:
        self._resident_before_bytes = _resident_peak_bytes()
        self._meter = _CudaMeter() if run.device_kind is DeviceKind.CUDA else _CpuMeter()
        return (yield)

    @hookimpl(wrapper=True)
    def wrap_model(
        self,
        context: TrainingContext,  # noqa: ARG002 - the hook's signature
        model: Any,
        optimizer: Any,  # noqa: ARG002
    ) -> Generator[None, WrappedModel, WrappedModel]:
        self._mapped_bytes = mapped_bytes(model.parameters())
        self.mark("before wrapping")
        wrapped = yield
        self._mapped_bytes = mapped_bytes(wrapped.model.parameters())
        self._optimizer = wrapped.optimizer
        self.mark("after wrapping")
        return wrapped

    @hookimpl(wrapper=True)
    def reduce_grads(
        self,
        context: TrainingContext,
        model: Any,  # noqa: ARG002
        sync: bool,
    ) -> Generator[None, ReduceGate, ReduceGate]:
        gate = yield
        if self._steps == STEPS_MEASURED and self._meter is not None:
            self.mark("end")
            self._meter = None
            self._write(context)
        return _MarkedGate(gate, self, sync)

    def mark(self, name: str) -> None:
        """Note what is live now, and the most since the last mark."""
        if self._meter is not None:
            live_bytes, peak_bytes = (seen + self._mapped_bytes for seen in self._meter.read())
            self._marks.append({"name": name, "live_bytes": live_bytes, "peak_bytes": peak_bytes})

    def enter(self) -> None:
        self._micro_batch += 1
        self.mark(f"step {self._steps + 1}, before micro-batch {self._micro_batch}")

    def leave(self, sync: bool) -> None:
        self.mark(f"step {self._steps + 1}, after micro-batch {self._micro_batch}")
        if sync:
            self._steps += 1
            self._micro_batch = 0

    def _write(self, context: TrainingContext) -> None:
        record = {
            "marks": self._marks,
            "optimizer_bytes": state_bytes(self._optimizer),
            "resident_before_bytes": self._resident_before_bytes,
            "resident_peak_bytes": _resident_peak_bytes(),
        }
        place = Path(context.run.run_dir) / f"memory.rank{context.process.rank}.json"
        place.write_text(json.dumps(record, indent=1), encoding="utf-8")


class _MarkedGate:
    """The backend's gate, with a mark at either end."""

    def __init__(self, gate: Any, probe: MemoryProbe, sync: bool) -> None:
        self._gate, self._probe, self._sync = gate, probe, sync

    def __enter__(self) -> None:
        self._probe.enter()
        self._gate.__enter__()

    def __exit__(self, *error: object) -> Any:
        swallowed = self._gate.__exit__(*error)
        self._probe.leave(self._sync)
        return swallowed


class _Meter:
    """Live bytes, and the most since the last reading."""

    def read(self) -> tuple[int, int]:
        raise NotImplementedError


class _CpuMeter(_Meter):
    """`tensor_meter.c`, which the benchmark has put in front of the C library."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        for name in ("fleettune_live_bytes", "fleettune_peak_bytes"):
            getattr(self._library, name).restype = ctypes.c_size_t
        self._library.fleettune_reset_peak()

    def read(self) -> tuple[int, int]:
        seen = self._library.fleettune_live_bytes(), self._library.fleettune_peak_bytes()
        self._library.fleettune_reset_peak()
        return seen


class _CudaMeter(_Meter):
    """The CUDA allocator's own counters."""

    def __init__(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def read(self) -> tuple[int, int]:
        seen = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return seen


def mapped_bytes(weights: Iterable[torch.Tensor]) -> int:
    """Bytes of `weights` that no allocator has seen: safetensors maps them from their file, and they stay those pages
    (private copies, once they are trained)."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return 0
    files: list[tuple[int, int]] = []
    for line in maps.read_text(encoding="utf-8").splitlines():
        if line.endswith(".safetensors"):
            first, last = line.split()[0].split("-")
            files.append((int(first, 16), int(last, 16)))
    storages = {
        weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes()
        for weight in weights
        if weight.device.type == "cpu" and type(weight.data) is torch.Tensor
    }
    return sum(size for place, size in storages.items() if any(first <= place < last for first, last in files))


def _resident_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
