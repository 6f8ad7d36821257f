"""The plan's memory estimate against what trainings really hold: the short run of the memory benchmark."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "memory.py"
WITHIN = 0.15
CASES = [f"llama {backend}×2 fp32" for backend in ("ddp", "zero-2", "zero-3", "fsdp")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        shutil.which("cc") is None or platform.libc_ver()[0] != "glibc", reason="the meter needs a C compiler and glibc"
    ),
]


@pytest.fixture(scope="module")
def figures(tmp_path_factory) -> dict[tuple[str, str], dict[str, Any]]:
    place = tmp_path_factory.mktemp("memory") / "figures.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--quick", "--json", str(place)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {(item["case"], item["part"]): item for item in json.loads(place.read_text())["figures"]}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("part", ["weights", "optimizer", "peak"])
def test_the_estimate_is_what_a_rank_holds(figures, case, part):
    figure = figures[case, part]
    assert figure["measured"] > 2**20, "nothing was measured"
    assert figure["ratio"] == pytest.approx(1, abs=WITHIN), figure


def test_every_quick_case_is_looked_at(figures):
    assert {case for case, _ in figures} == set(CASES)
