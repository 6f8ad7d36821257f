"""Runs the combinations of a verification one after the other, and compares what they left in their run folders."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from fleettune_core.plugins.catalog import Catalog
from fleettune_core.report import Report
from fleettune_core.run import Run, start
from fleettune_core.rundir import RunDir, write_atomically
from fleettune_core.verify.combinations import Combination, Verification
from fleettune_core.verify.comparison import TOLERANCES, ZERO, Compared, RunFigures, WeightDistance, compare

RESULT = "verify.json"
"""The file in the verification's folder that holds what `--json` prints."""


class Verifier:
    """One verification, combination by combination: `begin` it, wait as you like, `judge` it; at the end `close`."""

    def __init__(
        self, verification: Verification, *, env: Mapping[str, str], catalog: Catalog, keep_models: bool
    ) -> None:
        self.verification = verification
        self.compared: list[Compared] = []
        self._env = env
        self._catalog = catalog
        self._keep_models = keep_models
        self._reference: tuple[RunFigures, RunDir] | None = None
        self._started = 0.0

    def begin(self, combination: Combination) -> Run:
        """Start one run. Raises FtError as `run.start` does."""
        self._started = time.monotonic()
        return start(combination.plan, env=self._env, catalog=self._catalog)

    def judge(self, combination: Combination, run: Run) -> Compared:
        """Wait for its end and compare it with the first one."""
        report = run.finish().report
        figures = read_figures(combination.title, run.run_dir, report, time.monotonic() - self._started)
        if self._reference is None:
            self._reference = (figures, run.run_dir)
        reference, reference_dir = self._reference
        learning_rate = combination.plan.config.train.learning_rate
        assert learning_rate is not None, "the plan fills it in"
        compared = compare(
            reference,
            figures,
            weight_distance(reference_dir.model, run.run_dir.model),
            tolerance=TOLERANCES[self.verification.precision],
            learning_rate=learning_rate,
        )
        self.compared.append(compared)
        if figures is not reference:
            self._tidy(run.run_dir)
        self._write()
        return compared

    def close(self) -> None:
        """Remove what is only needed for comparing."""
        if self._reference is not None:
            self._tidy(self._reference[1])

    def _tidy(self, run_dir: RunDir) -> None:
        if not self._keep_models:
            shutil.rmtree(run_dir.model, ignore_errors=True)
            shutil.rmtree(run_dir.base, ignore_errors=True)

    def _write(self) -> None:
        path = self.verification.folder / RESULT
        write_atomically(path, json.dumps(to_dict(self.verification, self.compared), indent=2) + "\n")


def to_dict(verification: Verification, compared: list[Compared]) -> dict[str, Any]:
    """The JSON form."""
    tolerance = TOLERANCES[verification.precision]
    first = verification.combinations[0].plan
    return {
        "folder": str(verification.folder),
        "precision": verification.precision,
        "steps": verification.steps,
        "global_batch": first.batch.global_batch,
        "tolerance": _finite(dataclasses.asdict(tolerance)),
        "notes": list(verification.notes),
        "agree": len(compared) == len(verification.combinations) and all(item.agrees for item in compared),
        "runs": [_plain(item) for item in compared],
    }


def _plain(item: Compared) -> dict[str, Any]:
    flat = dataclasses.asdict(item)
    return _finite({**flat.pop("figures"), **flat})


def _finite(value: Any) -> Any:
    """JSON knows no infinity: it is written as text."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in cast("dict[str, Any]", value).items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_figures(title: str, run_dir: RunDir, report: Report, seconds: float) -> RunFigures:
    """A finished run's figures."""
    steps = [line for line in run_dir.read_metrics() if "loss" in line]
    world, failure = report.world, report.first_failure

    def most(name: str) -> int | None:
        values = [getattr(member, name) for member in world if getattr(member, name) is not None]
        return max(values, default=None)

    first = world[0] if world else None
    return RunFigures(
        title=title,
        exit_code=int(report.exit_code),
        cause=None if failure is None else failure.cause,
        problems=() if failure is None else failure.problems,
        losses=tuple(line["loss"] for line in steps),
        grad_norms=tuple(line.get("grad_norm") for line in steps),
        wrapper=None if first is None else first.wrapper,
        sharding=None if first is None else first.sharding,
        ranks=len(world),
        initial_weights=None if first is None else first.initial_weights,
        weight_bytes=most("weight_bytes"),
        optimizer_bytes=most("optimizer_bytes"),
        peak_memory_bytes=report.totals.peak_memory_bytes,
        seconds=round(seconds, 2),
    )


def weight_distance(left: Path, right: Path) -> WeightDistance | None:
    """How far the weights of two model folders are apart; None where one of the folders is not there."""
    if left == right:
        return ZERO
    if not (left.is_dir() and right.is_dir()):
        return None
    command = [sys.executable, "-m", "fleettune_core.verify.weights_main", str(left), str(right)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    if found["missing"]:
        return WeightDistance(rms=math.inf, largest=math.inf)
    return WeightDistance(rms=found["rms"], largest=found["largest"])
