"""`metrics.jsonl`: one object per optimizer step, written by rank 0 as it happens."""

from __future__ import annotations

import json
import math
import resource
import time
from collections.abc import Iterable
from typing import Any, TextIO

import torch

from fleettune_core.rundir import RunDir


def peak_memory_bytes(device: torch.device) -> int:
    """Peak of this process: allocated on its GPU, or resident in RAM on a machine without one."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def held_bytes(tensors: Iterable[Any]) -> int:
    """Bytes that this rank itself holds of `tensors`: its shard where one is divided over ranks."""
    total = 0
    for tensor in tensors:
        # ZeRO-3 keeps the shard beside the weight, which is empty unless it is small enough to stay whole.
        parts = [tensor, tensor.ds_tensor] if hasattr(tensor, "ds_tensor") else [tensor]
        local = [part.to_local() if hasattr(part, "to_local") else part for part in parts]
        total += sum(part.numel() * part.element_size() for part in local)
    return total


def state_bytes(optimizer: Any) -> int:
    """Bytes of optimizer state that this rank holds: the moments, without counters."""
    kept = (value for state in optimizer.state.values() for value in state.values())
    return held_bytes(value for value in kept if isinstance(value, torch.Tensor) and value.dim() > 0)


class MetricsWriter:
    """Appends to `metrics.jsonl`. A line is written whole and flushed, so a reader may follow it."""

    def __init__(self, run_dir: RunDir, device: torch.device) -> None:
        # Anew: a group that was started again begins at its first step; those of its earlier life would count twice.
        self._file: TextIO = run_dir.metrics_jsonl.open("w", encoding="utf-8")
        self._device = device
        self._clock = time.perf_counter()

    def restart_clock(self) -> None:
        """Leave what happened since the last line (an evaluation, a checkpoint) out of the next step's seconds."""
        self._clock = time.perf_counter()

    def step(self, *, step: int, epoch: float, logs: dict[str, float], tokens: int, samples: int) -> None:
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        self._write(
            {
                "step": step,
                "epoch": round(epoch, 6),
                "loss": logs["loss"],
                "grad_norm": logs.get("grad_norm"),
                "learning_rate": logs.get("learning_rate"),
                "tokens": tokens,
                "samples": samples,
                "step_seconds": round(seconds, 4),
                "tokens_per_second": round(tokens / seconds, 2),
                "peak_memory_bytes": peak_memory_bytes(self._device),
            }
        )

    def evaluation(self, *, step: int, epoch: float, logs: dict[str, float]) -> None:
        """An evaluation's own line: the step that it followed, and what begins with `eval_`."""
        values = {name: value for name, value in logs.items() if name.startswith("eval_")}
        self._write({"step": step, "epoch": round(epoch, 6), **values})
        self.restart_clock()

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        # NaN is no JSON; a diverged loss is told as null, and every reader of JSON can read the line.
        clean = {name: _finite(value) for name, value in line.items()}
        self._file.write(json.dumps(clean) + "\n")
        self._file.flush()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
