"""One version, one licence, one range of Pythons: the distributions are released in lockstep."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECTS = [ROOT, *sorted(path.parent for path in (ROOT / "packages").glob("*/pyproject.toml"))]
MEMBERS = PROJECTS[1:]


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements(folder: Path) -> list[str]:
    table = project(folder)
    return [
        *table.get("dependencies", []),
        *(item for extra in table.get("optional-dependencies", {}).values() for item in extra),
    ]


VERSION = project(ROOT)["version"]
by_name = pytest.mark.parametrize("folder", PROJECTS, ids=lambda folder: project(folder)["name"])


def test_every_folder_of_packages_is_a_distribution():
    folders = [path for path in (ROOT / "packages").iterdir() if path.is_dir()]
    assert sorted(folders) == MEMBERS


@by_name
def test_every_distribution_has_the_same_version(folder):
    assert project(folder)["version"] == VERSION


@by_name
def test_every_distribution_asks_for_exactly_this_version_of_its_siblings(folder):
    for requirement in requirements(folder):
        if requirement.startswith("fleettune"):
            assert re.fullmatch(rf"fleettune[a-z-]*(\[[\w,]+\])?=={re.escape(VERSION)}", requirement), requirement


@by_name
def test_every_distribution_says_the_same_of_python_and_licence(folder):
    table = project(folder)
    assert table["requires-python"] == ">=3.10,<3.14"
    versions = {item.rpartition(" ")[2] for item in table["classifiers"] if "Python :: 3." in item}
    assert versions == {"3.10", "3.11", "3.12", "3.13"}
    assert table["license"] == "Apache-2.0"
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_umbrella_depends_on_every_member_and_on_nothing_else():
    members = {f"{project(folder)['name']}=={VERSION}" for folder in MEMBERS}
    # DeepSpeed brings torch and more: whoever wants it asks for the extra.
    heavy = {f"fleettune-backend-deepspeed=={VERSION}"}
    assert set(project(ROOT)["dependencies"]) == members - heavy
    assert heavy <= set(project(ROOT)["optional-dependencies"]["deepspeed"])


def test_the_code_says_the_same_version_as_the_metadata():
    import fleettune_cli
    import fleettune_core

    assert fleettune_core.__version__ == VERSION
    assert fleettune_cli.__version__ == VERSION


@pytest.mark.parametrize("folder", MEMBERS, ids=lambda folder: folder.name)
def test_every_package_is_typed(folder):
    (package,) = (path for path in (folder / "src").iterdir() if not path.name.endswith(".egg-info"))
    assert (package / "py.typed").is_file()


def test_torch_is_pinned_for_tests_and_free_from_2_9_for_users():
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert "torch==2.13.0" in pins
    assert "torch>=2.9" in project(ROOT / "packages" / "core")["optional-dependencies"]["train"]


def test_constraints_are_exact_sorted_and_free_of_addresses():
    lines = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    names = [re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines]
    assert names == sorted(names)
    for line in lines:
        assert re.fullmatch(r'[\w.-]+==[\w.]+( ; python_version (<|>=) "3\.11")?', line), line


def test_everything_that_is_asked_for_is_pinned():
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = {re.sub(r"[-_.]+", "-", name).lower() for name in re.findall(r"^([\w.-]+)==", pins, re.MULTILINE)}
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    asked = [*groups["dev"], *(item for folder in PROJECTS for item in requirements(folder))]
    names = {re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", item)[0]).lower() for item in asked}
    assert {name for name in names - pinned if not name.startswith("fleettune")} == set()


def test_every_change_has_its_fragment():
    kinds = {"added", "changed", "fixed", "removed"}
    fragments = [path for path in (ROOT / "changelog.d").iterdir() if path.name != "README.md"]
    released = ROOT / "CHANGELOG.md"
    assert fragments or released.is_file()
    for path in fragments:
        assert re.fullmatch(r"(\d+|\+[\w-]+)(\.\d+)?\.(\w+)\.md", path.name), path.name
        assert path.name.split(".")[-2] in kinds, path.name
        assert path.read_text(encoding="utf-8").strip(), f"{path.name} is empty"
