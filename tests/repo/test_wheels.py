"""Each distribution is built as a wheel and installed alone, into an environment of its own, and imports there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

IMPORTS = {
    "fleettune": (),
    "fleettune-backend-deepspeed": ("fleettune_backend_deepspeed",),
    "fleettune-backend-fsdp": ("fleettune_backend_fsdp",),
    "fleettune-cli": ("fleettune_cli", "fleettune_cli.main"),
    "fleettune-core": ("fleettune_core", "fleettune_core.hookspecs", "fleettune_core.run"),
    "fleettune-launcher-slurm": ("fleettune_launcher_slurm",),
    "fleettune-launcher-torchrun": ("fleettune_launcher_torchrun",),
}
HEAVY = ("torch", "transformers", "trl", "accelerate", "peft", "datasets", "deepspeed", "numpy")
# Tracked file types that a wheel must carry beside the modules.
DATA = (".json", ".typed", ".txt", ".sh")


@dataclass(frozen=True)
class Installed:
    """An environment that holds one distribution and what it declares, nothing else of this project's tests."""

    python: Path

    def run(self, *arguments: str) -> str:
        environment = {"PATH": os.environ.get("PATH", ""), "HOME": str(self.python.parent)}
        command = [str(self.python), "-I", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/", check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, Path]:
    """The wheel of each distribution, built from a copy of the sources: building writes beside them."""
    copy, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    unwanted = shutil.ignore_patterns("*.egg-info", "__pycache__", "build")
    shutil.copytree(ROOT / "packages", copy / "packages", ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    found = {}
    for folder in (copy, *sorted((copy / "packages").iterdir())):
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(dist), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    for wheel in dist.glob("*.whl"):
        found[wheel.name.partition("-")[0].replace("_", "-")] = wheel
    return found


@pytest.fixture(scope="module")
def install(wheels, tmp_path_factory):
    """Install one distribution into a new environment; siblings come from the wheels, the rest is pinned."""
    made: dict[str, Installed] = {}

    def install(name: str) -> Installed:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            venv.create(folder, with_pip=True, symlinks=True)
            python = folder / "bin" / "python"
            pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
            pinned = ["--constraint", str(ROOT / "constraints.txt")]
            # pip's own variable for a folder to look in besides: the siblings are found there.
            siblings = {**os.environ, "PIP_FIND_LINKS": str(wheels[name].parent)}
            command = [*pip, *pinned, str(wheels[name])]
            done = subprocess.run(command, env=siblings, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            made[name] = Installed(python)
        return made[name]

    return install


def test_there_is_a_wheel_of_each_distribution(wheels):
    assert sorted(wheels) == sorted(IMPORTS)


@pytest.mark.parametrize("name", sorted(IMPORTS))
def test_a_wheel_installed_alone_imports_without_anything_heavy(install, name):
    lines = [f"import {module}" for module in IMPORTS[name]]
    check = f"import sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert install(name).run("-c", "\n".join([*lines, check])).strip() == "[]"


def test_core_alone_brings_no_torch(install):
    installed = install("fleettune-core").run("-m", "pip", "list", "--format=freeze", "--disable-pip-version-check")
    names = {line.partition("==")[0].lower() for line in installed.splitlines()}
    assert "fleettune-core" in names
    assert names.isdisjoint(HEAVY)


def test_the_umbrella_brings_the_command_and_every_plugin(install):
    environment = install("fleettune")
    listed = environment.run("-m", "fleettune_cli", "plugins", "list")
    for name in ("local", "torchrun", "slurm", "ddp"):
        assert name in listed
    assert (environment.python.parent / "ft").is_file()


@pytest.mark.parametrize("name", sorted(set(IMPORTS) - {"fleettune"}))
def test_a_wheel_carries_all_files_of_its_package_and_nothing_else(wheels, name):
    package = name.replace("-", "_")
    source = ROOT / "packages" / name.removeprefix("fleettune-") / "src"
    expected = {
        str(path.relative_to(source))
        for path in (source / package).rglob("*")
        if path.is_file() and (path.suffix == ".py" or path.suffix in DATA)
    }
    with zipfile.ZipFile(wheels[name]) as wheel:
        packed = {entry for entry in wheel.namelist() if ".dist-info/" not in entry}
        licences = [entry for entry in wheel.namelist() if entry.endswith("/licenses/LICENSE")]
    assert packed == expected
    assert len(licences) == 1
