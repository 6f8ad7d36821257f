"""System packages belong to the project: listed with a reason, installed as root, and told to anyone else."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import system_packages

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "tools" / "debian-packages.txt").read_text(encoding="utf-8").splitlines()
NAMES = [line.split()[0] for line in LINES if not line.startswith("#")]

Machine = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """`machine(uid, installed)`: run the script on a Debian of stubs; its stdout ends with what apt-get was asked."""

    def run(uid: int, installed: list[str], *, debian: bool = True) -> subprocess.CompletedProcess[str]:
        stubs = {"id": f"echo {uid}", "apt-get": 'echo "apt-get $*"'}
        if debian:
            cases = "".join(f"*' {name}') printf installed; exit 0;; " for name in installed)
            stubs["dpkg-query"] = f'case " $*" in {cases}esac; exit 1'
        for name in ("sed", "xargs", "dirname", "sh", "echo"):
            stubs[name] = f'exec /usr/bin/env -i PATH=/usr/bin:/bin {name} "$@"'
        for name, body in stubs.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
            (tmp_path / name).chmod(0o755)
        script = ROOT / "tools" / "system_packages.sh"
        return subprocess.run(
            ["/bin/sh", str(script)], env={"PATH": str(tmp_path)}, check=False, capture_output=True, text=True
        )

    return run


def test_each_package_stands_there_with_its_reason() -> None:
    assert sorted(NAMES) == NAMES
    assert all("#" in line and line.split("#")[1].strip() for line in LINES)


def test_root_gets_what_is_missing_and_no_more(machine: Machine) -> None:
    done = machine(0, ["g++"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "apt-get update -qq",
        "apt-get install -qq --yes --no-install-recommends libaio-dev python3-dev",
    ]


def test_where_nothing_is_missing_nothing_is_done(machine: Machine) -> None:
    done = machine(1000, NAMES)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_anyone_else_is_told_what_to_type(machine: Machine) -> None:
    done = machine(1000, ["g++", "python3-dev"])
    assert done.returncode == 1
    assert done.stderr == "Missing: libaio-dev. Type: sudo apt-get install libaio-dev\n"


def test_another_system_is_told_what_is_needed(machine: Machine) -> None:
    done = machine(0, [], debian=False)
    assert done.returncode == 0
    assert done.stdout.startswith("This is no Debian: ")
    assert "libaio-dev" in done.stdout


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_a_missing_package_fails_in_ci_and_is_told_elsewhere(
    monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(outcome, match=r"a C\+\+ compiler is not here: make system \(or apt-get install g\+\+\)"):
        system_packages.need_libaio()
