"""Operations that DeepSpeed compiles on first use: checked, announced, built by one process at a time. Worker side."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from filelock import FileLock

from fleettune_core.errors import ExitCode, FtError

CPU_SECONDS: Mapping[str, int] = MappingProxyType({"AsyncIOBuilder": 340, "PinMemoryBuilder": 30})
"""Builders of what offloading to a disk needs, with the seconds that a core of 2024 compiles; one loads the other."""

PATIENCE_SECONDS = 10.0
"""How long a lock of torch's may be there untold: a rank that loads what is compiled holds it for a moment."""


class Builder(Protocol):
    """One of DeepSpeed's `OpBuilder`s."""

    @property
    def name(self) -> str: ...

    def sources(self) -> Sequence[str]: ...

    def deepspeed_src_path(self, code_path: str) -> str: ...

    def load(self, verbose: bool = ...) -> Any: ...


def build_async_io(announce: Callable[[str], None]) -> None:
    """Have DeepSpeed's async_io operation ready. Raises FtError (exit code 5) where it cannot be built."""
    # DeepSpeed calls ninja by its bare name, and an environment that nobody has activated is not on the path.
    os.environ["PATH"] = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)))
    _check_compiler()
    from deepspeed.ops import op_builder

    builders = [getattr(op_builder, name)() for name in ("PinMemoryBuilder", "AsyncIOBuilder")]
    if not builders[-1].is_compatible(verbose=False):
        raise FtError(
            "offloading to nvme needs DeepSpeed's async_io operation, and libaio is not here to build it",
            hint="apt-get install libaio-dev (libaio-devel elsewhere), or offload to cpu",
            exit_code=ExitCode.CONFIG,
        )
    build(builders, extensions_folder(), announce)


def extensions_folder() -> Path:
    """Where torch keeps what it has compiled."""
    from torch.utils.cpp_extension import _get_build_directory

    # It has no name for the folder itself, and makes the one that it is asked for.
    return Path(_get_build_directory("async_io", verbose=False)).parent


def build(builders: Sequence[Builder], folder: Path, announce: Callable[[str], None]) -> None:
    """Compile what is not in `folder` yet, in one process at a time; the others find it there.

    Says so before and after, and nothing where there is nothing to compile. Raises FtError (exit code 5) when the
    compiler fails; what it said is in this rank's log.
    """
    missing = [builder for builder in builders if not is_built(builder, folder)]
    if missing:
        names = " and ".join(builder.name for builder in missing)
        # Every rank says it, in the same words: it is shown once, whichever of them compiles.
        announce(f"compiling DeepSpeed's {names}, once ({_about(missing)}); it is kept in {folder}")
    elif not any(_torch_lock(builder, folder).exists() for builder in builders):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".fleettune.lock"):
        for builder in builders:
            _clear(builder, folder, announce)
        missing = [builder for builder in missing if not is_built(builder, folder)]
        started = time.monotonic()
        for builder in missing:
            _compile(builder, folder)
    if missing:
        announce(f"compiled in {time.monotonic() - started:.0f} s")


def is_built(builder: Builder, folder: Path) -> bool:
    """Whether `folder` holds the operation, of these very sources, and ninja would have nothing to do for it."""
    place = folder / builder.name
    try:
        steps = (place / "build.ninja").read_text(encoding="utf-8")
    except OSError:
        return False
    sources = [str(Path(builder.deepspeed_src_path(source)).absolute()) for source in builder.sources()]
    if not (place / f"{builder.name}.so").is_file() or not all(source in steps for source in sources):
        return False
    dry_run = [sys.executable, "-m", "ninja", "-n"]
    asked = subprocess.run(dry_run, cwd=place, check=False, capture_output=True, text=True)
    return "no work to do" in asked.stdout


def _torch_lock(builder: Builder, folder: Path) -> Path:
    """The file that torch makes while it compiles, and waits for, however long, where it finds one."""
    return folder / builder.name / "lock"


def _mark(builder: Builder, folder: Path) -> Path:
    """A file that is there while one of us compiles."""
    return folder / builder.name / ".fleettune"


def _clear(builder: Builder, folder: Path, announce: Callable[[str], None]) -> None:
    """Let no lock of torch's be in the way, or say what we wait for. Our own lock is held."""
    lock, mark = _torch_lock(builder, folder), _mark(builder, folder)
    if mark.exists():
        # One of us was killed while it compiled: the lock is nobody's.
        lock.unlink(missing_ok=True)
        mark.unlink(missing_ok=True)
    told_at = time.monotonic() + PATIENCE_SECONDS
    told = False
    while lock.exists():
        if not told and time.monotonic() > told_at:
            announce(f"waiting for another program to compile; if there is none: rm {lock}")
            told = True
        time.sleep(0.1)


def _compile(builder: Builder, folder: Path) -> None:
    mark = _mark(builder, folder)
    mark.parent.mkdir(exist_ok=True)
    mark.touch()
    try:
        builder.load(verbose=False)
    except (RuntimeError, ImportError, OSError) as error:
        print(error)
        raise FtError(
            f"DeepSpeed's operation {builder.name} could not be compiled: {str(error).strip().splitlines()[0]}",
            hint="what the compiler said is in this rank's log; offload to cpu to do without it",
            exit_code=ExitCode.CONFIG,
        ) from error
    finally:
        mark.unlink(missing_ok=True)


def _check_compiler() -> None:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise FtError(
            f"offloading to nvme compiles an operation of DeepSpeed's, and there is no C++ compiler {compiler} here",
            hint="apt-get install g++ libaio-dev, or offload to cpu",
            exit_code=ExitCode.CONFIG,
        )
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise FtError(
            f"offloading to nvme compiles an operation of DeepSpeed's, and {headers} holds no Python.h",
            hint="apt-get install python3-dev (or what brings the headers of your Python), or offload to cpu",
            exit_code=ExitCode.CONFIG,
        )


def _about(builders: Sequence[Builder]) -> str:
    work = sum(CPU_SECONDS.get(type(builder).__name__, 60) for builder in builders)
    seconds = work / max(1, len(os.sched_getaffinity(0)))
    return f"about {math.ceil(seconds / 60)} min" if seconds > 90 else f"about {math.ceil(seconds / 10) * 10} s"
