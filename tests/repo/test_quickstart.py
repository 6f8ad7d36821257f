"""The first thing that a newcomer runs: its data can be checked, and it keeps what its last line says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
LAST_LINE = re.compile(r"quickstart: exact match (\d\.\d\d) -> (\d\.\d\d) in (\d+) s")


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, list[dict[str, str]]]:
    folder = tmp_path_factory.mktemp("rows")
    subprocess.run([sys.executable, str(QUICKSTART / "make_rows.py"), str(folder)], check=True, capture_output=True)
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.iterdir()}


def test_the_rows_are_the_same_every_time(rows, tmp_path):
    subprocess.run([sys.executable, str(QUICKSTART / "make_rows.py"), str(tmp_path)], check=True, capture_output=True)
    for name, expected in rows.items():
        assert [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()] == expected


def test_every_answer_is_strict_json_about_its_sentence(rows):
    for row in [*rows["train"], *rows["heldout"]]:
        answer = json.loads(row["completion"])
        assert list(answer) == ["name", "item", "quantity", "city", "date"]
        assert answer["name"] in row["prompt"]
        assert answer["city"] in row["prompt"]
        assert 2 <= answer["quantity"] <= 12
        assert re.fullmatch(r"\d\d?/\d\d?", answer["date"])


def test_no_held_out_order_shares_its_person_thing_and_town_with_a_training_row(rows):
    def combinations(name: str) -> set[tuple[str, str, str]]:
        answers = [json.loads(row["completion"]) for row in rows[name]]
        return {(answer["name"], answer["item"], answer["city"]) for answer in answers}

    assert len(rows["heldout"]) == 40
    assert combinations("train").isdisjoint(combinations("heldout"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstart_learns_and_says_so_in_its_last_line(tmp_path):
    environment = {**os.environ, "FT_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(QUICKSTART / "quickstart.py")]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    match = LAST_LINE.fullmatch(done.stdout.splitlines()[-1])
    assert match, done.stdout
    before, after = float(match[1]), float(match[2])
    assert before <= 0.2
    assert after >= 0.8
