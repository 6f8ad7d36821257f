"""Which arithmetic a run uses, and why."""

from __future__ import annotations

from fleettune_core.errors import FtError, did_you_mean
from fleettune_core.plan.model import Choice
from fleettune_core.types import DeviceKind, Devices

PRECISIONS = ("auto", "fp32", "bf16", "fp16")


def choose_precision(requested: str, devices: Devices) -> Choice:
    """`fp32`, `bf16` or `fp16` for `devices`, with the reason in words.

    `auto` is bf16 where the device multiplies bf16 natively, else fp32: fp16 needs loss scaling and is never chosen
    unasked. Raises `FtError` (exit code 5) for fp16 on a CPU.
    """
    if requested not in PRECISIONS:
        raise FtError(
            f"precision {requested!r} is not known{did_you_mean(requested, PRECISIONS)}",
            hint=f"--precision takes {', '.join(PRECISIONS)}",
        )
    cpu = devices.kind is DeviceKind.CPU
    device = "this CPU" if cpu else devices.name
    by = f" ({devices.bf16_by})" if devices.bf16_by else ""
    if requested == "auto":
        if devices.bf16:
            return Choice(name="bf16", reason=f"auto: {device} multiplies bf16{by}")
        return Choice(name="fp32", reason=f"auto: {device} has no bf16 arithmetic{by}")
    if requested == "fp16" and cpu:
        raise FtError(
            "fp16 does not train on a CPU",
            hint=f"--precision {'bf16' if devices.bf16 else 'fp32'}, or leave --precision out",
        )
    if requested == "bf16" and not devices.bf16:
        return Choice(name="bf16", reason=f"as asked; slow: {device} has no bf16 arithmetic{by}, it is emulated")
    if requested == "fp16":
        return Choice(name="fp16", reason="as asked; with loss scaling")
    return Choice(name=requested, reason="as asked")
