"""The docs say what the code says: hooks, help pages, exit codes, settings, links."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
from pathlib import Path
from types import ModuleType

import click
import pytest
from click.exceptions import Exit

from fleettune_core.errors import FtError

ROOT = Path(__file__).parents[2]
TEXTS = {".py", ".md", ".toml", ".txt", ".yaml", ".json", ".cfg", ""}
DOCS = ROOT / "docs"
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("packages/*/*.md"), *ROOT.glob("changelog.d/*.md")]
)


@pytest.fixture(scope="module")
def make_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_docs", ROOT / "tools" / "make_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_every_hook_stands_in_the_docs_with_its_exact_signature(make_docs):
    found = list(make_docs.hooks())
    assert len(found) >= 10
    for name, hook in found:
        assert make_docs.signature(name, hook) in page("hooks.md")


def test_a_hook_is_shown_with_its_types(make_docs):
    signatures = [make_docs.signature(name, hook) for name, hook in make_docs.hooks()]
    assert "plan_launch(request: LaunchRequest) -> LaunchPlan" in signatures


def test_the_generated_parts_are_fresh(make_docs):
    stale = [path.name for path, _ in make_docs.stale_pages()]
    assert not stale, f"run make docs: {stale}"


def test_a_stale_part_is_noticed(make_docs):
    text = "a\n<!-- generated: hooks -->\nold\n<!-- end: hooks -->\nz\n"
    assert make_docs.replace_part(text, "hooks", "new") == (
        "a\n<!-- generated: hooks -->\n\nnew\n<!-- end: hooks -->\nz\n"
    )
    with pytest.raises(ValueError, match="generated: cli"):
        make_docs.replace_part(text, "cli", "new")


def test_every_setting_of_the_run_file_is_in_its_page():
    from fleettune_core.config.fields import settings_of
    from fleettune_core.config.schema import SECTIONS, RunConfig

    text = page("run-file.md")
    for section, owner in SECTIONS.items():
        for setting in settings_of(owner):
            assert f"`{setting.name}`" in text, f"{section}.{setting.name}"
            for flag in setting.flags[:1]:
                assert f"`{flag}`" in text, flag
    for setting in settings_of(RunConfig):
        assert f"`{setting.name}`" in text


def test_every_exit_code_is_in_its_page():
    from fleettune_core.errors import ExitCode

    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", page("exit-codes.md"), re.MULTILINE)}
    assert documented == {int(code) for code in ExitCode}


def test_every_file_of_the_run_folder_is_in_its_page():
    from fleettune_core.rundir import RunDir

    text = page("run-folder.md")
    paths = [value for name, value in vars(RunDir).items() if isinstance(value, property)]
    names = [member.fget(RunDir(Path("run"))).name for member in paths]
    assert len(names) > 5
    for name in names:
        assert f"`{name}" in text, name


def test_every_page_is_reached_from_the_index():
    index = page("index.md")
    for path in DOCS.glob("*.md"):
        assert path.name == "index.md" or f"({path.name})" in index, path.name


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_is_alive(path):
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file) if file else path
        assert linked.exists(), f"{target} leads nowhere"
        if anchor:
            assert anchor in anchors(linked), f"{target}: no such heading"


COMMAND_LINE = re.compile(r"(?:(?<=/)|(?<![\w./`-]))ft (?=[\w-])(?:[^\n|;&<>()#`]|<[\w-]+>)*")
"""`ft` and what belongs to it, up to what a shell would take for itself."""


def command_lines(text: str) -> list[str]:
    """Every `ft ...` in the code blocks of a page, fenced or indented; what Click itself prints as usage is none."""
    fenced = re.findall(r"^```[^\n]*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(
        r"^(?: {4}|\t).*$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    lines = "\n".join([*fenced, *indented]).replace("\\\n", " ").splitlines()
    return [found[0].strip() for line in lines if "Usage: ft" not in line for found in COMMAND_LINE.finditer(line)]


def parse_command_line(line: str) -> None:
    """Let Click resolve the command and read its arguments, without running it. Raises what `ft` would show."""
    from fleettune_cli.commands.train import run_file
    from fleettune_cli.main import cli

    try:
        context = cli.make_context("ft", shlex.split(line)[1:])
        while isinstance(context.command, click.Group):
            words = [*context._protected_args, *context.args]
            name, command, rest = context.command.resolve_command(context, words)
            assert command is not None
            context = command.make_context(name, rest, parent=context)
    except Exit:
        return  # --help and --version have said all there is
    if context.info_name == "train":
        run_file(context, context.params["words"])


PAGES_WITH_COMMANDS = [path for path in PAGES if path.parent in (ROOT, DOCS) and command_lines(path.read_text("utf-8"))]


@pytest.mark.parametrize("path", PAGES_WITH_COMMANDS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_in_a_code_block_can_be_typed(path):
    for line in command_lines(path.read_text(encoding="utf-8")):
        try:
            parse_command_line(line)
        except (click.ClickException, FtError) as error:
            pytest.fail(f"{line}: {error}")


def test_the_pages_that_show_commands_are_read():
    assert {"data.md", "launchers.md", "run-file.md", "install.md"} <= {path.name for path in PAGES_WITH_COMMANDS}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("    ft train run.yaml   # every GPU", ["ft train run.yaml"]),
        ("    srun -N2 ft train run.yaml --run-dir DIR", ["ft train run.yaml --run-dir DIR"]),
        ('    eval "$(ft completion bash)"', ["ft completion bash"]),
        ("    FT_LAUNCHER=local ft train a.yaml && ft doctor", ["ft train a.yaml", "ft doctor"]),
        ("```\nft train a.yaml \\\n  --lora\n```", ["ft train a.yaml    --lora"]),
        ("```python\nfrom peft import x\n```", []),
        ("Type ft train in a sentence.", []),
    ],
)
def test_a_command_is_found_where_it_stands(line, found):
    assert command_lines(line) == found


@pytest.mark.parametrize(
    "line",
    [
        "ft trian x.yaml",
        "ft train x.yaml --no-such-option",
        "ft train x.yaml --lora true",
        "ft data preview --dataset",
        "ft plugins lst",
        "ft completion tcsh",
    ],
)
def test_a_command_that_cannot_be_typed_is_noticed(line):
    with pytest.raises((click.ClickException, FtError)):
        parse_command_line(line)


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_no_file_names_an_index_or_this_machine():
    # In pieces: this file names none either.
    indexes = ["py" + "pi.org", "python" + "hosted", "index" + "-url", "download.py" + "torch.org"]
    here = [f"{place}/" for place in (ROOT, Path.home()) if len(place.parts) > 2]  # a shorter one may mean anything
    suspicious = re.compile("|".join(map(re.escape, [*indexes, *here])))
    # Also what is not committed yet, but nothing that is ignored.
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name]
    texts = [path for path in files if path.is_file() and path != Path(__file__) and path.suffix in TEXTS]
    assert ROOT / "Makefile" in texts
    assert [path for path in texts if suspicious.search(path.read_text(encoding="utf-8"))] == []


def test_every_kind_of_plugin_trouble_is_in_the_contract():
    from fleettune_core.plugins.trouble import TroubleKind

    for kind in TroubleKind:
        assert f"`{kind.value}`" in page("hooks.md")


def test_every_option_of_the_built_in_backend_is_in_its_page():
    from fleettune_core.backends.ddp import DdpOptions
    from fleettune_core.config.fields import settings_of

    for setting in settings_of(DdpOptions):
        assert f"`{setting.name}`" in page("backends.md")
