"""What DeepSpeed's engine holds on a rank, for the estimate in the plan. Standard library only.

Read in DeepSpeed 0.19 (`runtime/zero/stage_1_and_2.py`, `stage3.py`, `partitioned_param_coordinator.py`) and compared
with the live bytes of real trainings (benchmarks/memory.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleettune_backend_deepspeed.ds_config import LARGEST_BUCKET
from fleettune_backend_deepspeed.options import DeepSpeedOptions
from fleettune_core.types import DeviceKind, MemoryDivision

MAX_LIVE_PARAMETERS = 1_000_000_000
"""DeepSpeed's default of `stage3_max_live_parameters`: a smaller model is gathered whole, and kept."""

_DIVIDED = ("nothing", "optimizer state", "gradients and optimizer state", "everything")


def divide(
    options: DeepSpeedOptions, user: Mapping[str, Any], *, ranks: int, device_kind: DeviceKind
) -> MemoryDivision:
    """How stage, offloading and the user's own JSON (`user`) divide memory over `ranks` ranks."""
    stage = options.zero_stage
    on_gpu = device_kind is DeviceKind.CUDA
    zero: Mapping[str, Any] = user.get("zero_optimization", {})
    bucket = zero.get("reduce_bucket_size")
    # Two buckets take turns where reduction overlaps with the backward; at stage 3 there is one.
    buckets = 2 if zero.get("overlap_comm") and stage in (1, 2) else 1
    optimizer_offloaded = options.offload_optimizer == "nvme" or (on_gpu and options.offload_optimizer == "cpu")
    gathers = stage == 3 and ranks > 1
    on_disk = options.offload_params == "nvme"  # then `ds_config.PARAMS_ON_DISK` keeps none but what is in use
    live = 0 if on_disk else int(zero.get("stage3_max_live_parameters", MAX_LIVE_PARAMETERS))
    return MemoryDivision(
        weights=ranks if stage == 3 else 1,
        gradients=ranks if stage >= 2 else 1,
        optimizer=ranks if stage >= 1 else 1,
        # A single rank has nothing to gather: its shards are the weights.
        gathered_elements=live if gathers else 0,
        gathered_layers=2 if gathers else 0,
        weights_offloaded=on_disk or (on_gpu and options.offload_params == "cpu"),
        # The optimizer's gradients go where its state is.
        gradients_offloaded=optimizer_offloaded,
        optimizer_offloaded=optimizer_offloaded,
        bucket_elements=0 if stage == 0 else buckets * int(LARGEST_BUCKET if bucket is None else bucket),
        bucket_fixed=bucket is not None,
        bucket_lives=("backward", "step", "backward", "run")[stage],
        master_copies=_master_copies(options),
        # Gradients are made flat once more for the step (at stage 0, for their reduction), beside AdamW's temporaries:
        # one copy on a GPU, two on a CPU, where they are not made in place.
        step_copies=1 if stage == 0 else 2 if on_gpu else 3,
        note=f"ZeRO stage {stage} divides {_DIVIDED[stage]} over {ranks} ranks"
        + (f" and gathers up to {live:,} weights to compute" if gathers and live else ""),
    )


def _master_copies(options: DeepSpeedOptions) -> int:
    """The optimizer works on flat fp32 partitions of its own, even where the weights are fp32 themselves. Offloaded to
    memory (which counts where that is the device's own, on a CPU), their gradients stay beside them; and at stages 1
    and 2 a buffer from which the weights are written back."""
    if options.zero_stage == 0:
        return 0
    if options.offload_optimizer != "cpu":
        return 1
    return 2 if options.zero_stage == 3 else 3
