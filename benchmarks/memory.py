"""Compare the plan's memory estimate with the bytes that trainings really hold.

    python benchmarks/memory.py [--quick] [--only WORDS] [--json FILE]

Each case is a real `ft train` of three steps with rows of one length, all of them supervised, and two micro-batches per
step, so that gradients lie beside activations. What is measured are live tensor bytes of rank 0 (see memory_probe.py).

Rows of the table, in MiB:
  weights      what the rank holds of them when it does not compute
  optimizer    the optimizer's state: AdamW's moments
  held         everything that lies between two micro-batches: weights, state, gradients, buffers
  computing    what the last micro-batch adds at its peak: activations, logits, gathered weights
  peak         the most of the whole second step: the estimate's total
Exit code 1 when a training fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memory_cases import LENGTH, Case, cases, write_model, write_rows

HERE = Path(__file__).resolve().parent
MIB = 2**20
JUDGED = ("weights", "optimizer", "peak")
"""Parts whose worst ratio is told; the others help to find out why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One part of one case, in bytes."""

    case: str
    part: str
    estimated: int
    measured: int

    @property
    def ratio(self) -> float:
        return self.estimated / self.measured if self.measured else float("inf")

    @property
    def off(self) -> float:
        """How far the estimate is from what was measured, as a share."""
        return abs(self.ratio - 1)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description="Memory: estimated against measured.")
    parser.add_argument("--quick", action="store_true", help="one case for each backend on two ranks")
    parser.add_argument("--only", metavar="WORDS", help="cases whose name has these words")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there as well")
    said = parser.parse_args(argv)
    wanted = [case for case in cases() if case.quick or not said.quick]
    if said.only:
        wanted = [case for case in wanted if set(said.only.split()) <= set(case.name.split())]
    started = time.monotonic()
    figures: list[Figure] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="ft-bench-memory-") as folder:
        bench = Bench(Path(folder))
        print(_HEADER, flush=True)
        for case in wanted:
            try:
                seen = bench.run(case)
            except RuntimeError as error:
                failed.append(case.name)
                print(f"{case.name}: {error}", flush=True)
                continue
            figures += seen
            print("\n".join(map(_line, seen)), flush=True)
    print(f"\n{_summary(figures)} ({len(wanted)} trainings in {time.monotonic() - started:.0f} s)")
    if said.json:
        said.json.write_text(json.dumps(to_json(figures), indent=1) + "\n", encoding="utf-8")
    return 1 if failed or not figures else 0


class Bench:
    """Runs cases; models, rows and the meter are made once in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows = write_rows(folder / "rows.jsonl", 16)
        self._environment = self._prepare()

    def run(self, case: Case) -> list[Figure]:
        """Train `case` and compare. Raises RuntimeError when the training fails."""
        run_dir = self._folder / "run"
        shutil.rmtree(run_dir, ignore_errors=True)
        command = [
            *(sys.executable, "-m", "fleettune_cli", "train", "--run-dir", str(run_dir)),
            *("--model", write_model(case.model, self._folder / case.model), "--dataset", str(self._rows)),
            *("--max-length", str(LENGTH), "--max-steps", "3"),
            *("--micro-batch", "2", "--gradient-accumulation-steps", "2", *case.arguments),
        ]
        done = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"ft train ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
        return compare(case.name, run_dir)

    def _prepare(self) -> Mapping[str, str]:
        """The environment of a run: with the probe installed, and on a CPU the meter before the C library."""
        site = self._folder / "site"
        info = site / "fleettune_memory_probe-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fleettune-memory-probe\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[fleettune.extensions]\nmemory-probe = memory_probe:MemoryProbe\n")
        path = os.pathsep.join(filter(None, [str(site), str(HERE), os.environ.get("PYTHONPATH", "")]))
        return {
            **os.environ,
            "PYTHONPATH": path,
            "FT_CACHE_DIR": os.environ.get("FT_CACHE_DIR", str(self._folder / "cache")),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "LD_PRELOAD": str(self._meter()),
        }

    def _meter(self) -> Path:
        library = self._folder / "tensor_meter.so"
        compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            sys.exit("benchmarks/memory.py compiles tensor_meter.c, and there is no C compiler (cc)")
        command = [compiler, "-O2", "-shared", "-fPIC", "-pthread", "-o", str(library), str(HERE / "tensor_meter.c")]
        subprocess.run([*command, "-ldl"], check=True)
        return library


def compare(case: str, run_dir: Path) -> list[Figure]:
    """The figures of a finished run."""
    record = json.loads((run_dir / "memory.rank0.json").read_text(encoding="utf-8"))
    live = {mark["name"]: mark["live_bytes"] for mark in record["marks"]}
    peak = {mark["name"]: mark["peak_bytes"] for mark in record["marks"]}
    held, last = "step 2, before micro-batch 2", "step 2, after micro-batch 2"
    # A mark's peak is that of the time before it.
    second_step = (peak["step 2, after micro-batch 1"], peak[held], peak[last], peak["end"])
    measured = {
        # What the wrapping adds is the backend's: copies and buffers. Where it divides weights, it leaves less.
        "weights": min(live["before wrapping"], live["after wrapping"]),
        "optimizer": record["optimizer_bytes"],
        "held": live[held],
        "computing": peak[last] - live[held],
        "peak": max(second_step),
    }
    estimated = estimates(run_dir)
    planned = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))["memory"]["total"]
    assert estimated["peak"] == planned, "the estimate here is not the plan's"
    figures = [
        Figure(case=case, part=part, estimated=estimated[part], measured=value) for part, value in measured.items()
    ]
    resident = record["resident_peak_bytes"] - record["resident_before_bytes"]
    return [*figures, Figure(case=case, part="resident", estimated=estimated["peak"], measured=resident)]


def estimates(run_dir: Path) -> dict[str, int]:
    """The plan's estimate, made again in the parts that are measured."""
    from fleettune_core.models.resolve import resolve_model
    from fleettune_core.models.shape import find_shape
    from fleettune_core.plan.model_facts import ModelFacts, estimate_memory
    from fleettune_core.plan.record import read_run_record
    from fleettune_core.plugins.relay import Relay
    from fleettune_core.types import MemoryDivision, MemoryRequest, current_environment

    run = read_run_record(json.loads((run_dir / "run.json").read_text(encoding="utf-8")))
    relay = Relay.for_worker(run.backend.name)
    request = MemoryRequest(
        options=relay.options_of(run.backend.name, run.config.backend_options),
        ranks=run.layout.ranks,
        device_kind=run.device_kind,
        lora=run.config.model.lora,
    )
    division = relay.call("divide_memory", request=request) or MemoryDivision()
    assert run.config.model.model is not None
    ref = resolve_model(run.config.model.model)
    found = find_shape(ref, env=current_environment())
    model = ModelFacts(ref=ref, shape=found.shape, reason=found.reason)

    def estimated(shares: MemoryDivision) -> Any:
        figure, reason = estimate_memory(run.config, model, run.batch, run.precision, shares)
        assert figure is not None, reason
        return figure

    whole = estimated(division)
    idle = {"gathered_layers": 0, "gathered_root": False, "gathered_elements": 0, "step_copies": 0}
    resting = estimated(dataclasses.replace(division, **idle))
    bare = estimated(dataclasses.replace(division, **idle, master_copies=0))
    if division.bucket_lives == "backward":
        bucketless = estimated(dataclasses.replace(division, **idle, bucket_elements=0, bucket_fixed=False))
    else:
        bucketless = resting
    held = resting.weights + resting.optimizer + bucketless.gradients
    return {
        "weights": resting.weights,
        "optimizer": bare.optimizer,
        "held": held,
        "computing": whole.weights + resting.optimizer + whole.gradients + whole.activations + whole.logits - held,
        "peak": whole.total,
    }


_WIDTHS = (30, 10, 11, 10, 7)
_HEADER = "".join(
    f"{word:<{width}}" if index < 2 else f"{word:>{width}}"
    for index, (word, width) in enumerate(zip(("case", "part", "estimated", "measured", "ratio"), _WIDTHS, strict=True))
)


def _line(figure: Figure) -> str:
    case, part, *rest = _WIDTHS
    sizes = f"{figure.estimated / MIB:>{rest[0]}.1f}{figure.measured / MIB:>{rest[1]}.1f}"
    return f"{figure.case:<{case}}{figure.part:<{part}}{sizes}{figure.ratio:>{rest[2]}.2f}"


def _summary(figures: Iterable[Figure]) -> str:
    words: list[str] = []
    for part in JUDGED:
        mine = [figure for figure in figures if figure.part == part]
        if mine:
            worst = max(mine, key=lambda figure: figure.off)
            words.append(f"{part} {worst.ratio:.2f} ({worst.case})")
    return "worst ratio: " + ", ".join(words)


def to_json(figures: Iterable[Figure]) -> dict[str, Any]:
    """The figures in bytes, with the versions that they hold for and the worst of each judged part."""
    figures = list(figures)
    libraries = ("torch", "transformers", "trl", "deepspeed")
    return {
        "versions": {name: importlib.metadata.version(name) for name in libraries},
        "worst_off": {
            part: max((figure.off for figure in figures if figure.part == part), default=None) for part in JUDGED
        },
        "figures": [{**dataclasses.asdict(figure), "ratio": round(figure.ratio, 4)} for figure in figures],
    }


if __name__ == "__main__":
    sys.exit(main())
