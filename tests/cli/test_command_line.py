"""The command line itself: names, spellings, mistakes, exit codes. Nothing is planned or started here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from fleettune_cli import main as entry
from fleettune_cli.commands import train as train_module
from fleettune_cli.errors import guard
from fleettune_cli.main import COMMANDS, cli
from fleettune_core.config.fields import settings_of
from fleettune_core.config.schema import SECTIONS
from fleettune_core.errors import ExitCode, FtError


def ft(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words), prog_name="ft")


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `ft train` hands to `load_config`; the run ends there."""
    seen: dict[str, Any] = {}

    def load_config(**arguments: Any) -> None:
        seen.update(arguments)
        raise FtError("that is all", exit_code=ExitCode.LAUNCH)

    monkeypatch.setattr("fleettune_core.config.load.read_config", load_config)
    return seen


def test_every_command_in_the_list_can_be_loaded() -> None:
    for command in COMMANDS:
        result = ft(command.name, "--help")
        assert result.exit_code == 0, result.output
        assert command.name in result.stdout


def test_the_summary_in_the_list_is_the_first_line_of_the_commands_own_help() -> None:
    with click.Context(cli, info_name="ft") as context:
        for command in COMMANDS:
            loaded = cli.load_command(context, command.name)
            assert loaded is not None
            assert (loaded.help or "").split("\n")[0] == command.summary


def test_ft_alone_shows_the_help_and_says_usage() -> None:
    result = ft()
    assert result.exit_code == ExitCode.USAGE
    assert result.stdout == ""
    assert "Fine-tune a language model." in result.stderr


def test_every_setting_with_a_flag_is_an_option_of_train_and_nothing_is_cut_off() -> None:
    text = ft("train", "--help").stdout
    for owner in SECTIONS.values():
        for setting in settings_of(owner):
            if setting.flags:
                shown = f"--[no-]{setting.flags[0][2:]}" if setting.base_type is bool else setting.flags[0]
                assert shown in text
            for choice in setting.choices:
                assert choice in text
    assert "alp…" not in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    "spelling", ["--per-device-train-batch-size", "--per_device_train_batch_size", "--per-device_train-batch_size"]
)
@pytest.mark.parametrize("joined", [True, False])
def test_dash_and_underscore_are_one_letter_in_option_names(
    loaded: dict[str, Any], spelling: str, joined: bool
) -> None:
    ft("train", *([f"{spelling}=2"] if joined else [spelling, "2"]))
    assert loaded["flags"] == {"batch.per_device_train_batch_size": (spelling, "2")}


def test_a_value_keeps_its_underscores(loaded: dict[str, Any]) -> None:
    ft("train", "--optim=adamw_torch", "--set", "train.adam_beta1=0.8", "--name", "a_b")
    assert loaded["flags"] == {"train.optim": ("--optim", "adamw_torch"), "name": ("--name", "a_b")}
    assert loaded["sets"] == ("train.adam_beta1=0.8",)


def test_only_what_was_typed_reaches_the_config(loaded: dict[str, Any]) -> None:
    ft("train")
    assert loaded["flags"] == {}
    assert loaded["file"] is None


def test_a_switch_can_be_said_both_ways_and_in_its_other_name(loaded: dict[str, Any]) -> None:
    ft("train", "--use_peft")
    assert loaded["flags"] == {"model.lora": ("--use_peft", True)}
    ft("train", "--no-lora")
    assert loaded["flags"] == {"model.lora": ("--no-lora", False)}


def test_a_plugin_option_with_a_flag_goes_under_its_section(loaded: dict[str, Any]) -> None:
    ft("train", "--grad_compression", "bf16")
    assert loaded["flags"] == {"backend.grad_compression": ("--grad_compression", "bf16")}


def test_the_run_file_is_the_one_word_that_belongs_to_no_option(loaded: dict[str, Any], tmp_path: Path) -> None:
    ft("train", "run.yaml", "--lora")
    assert loaded["file"] == Path("run.yaml")


def test_an_odd_file_name_with_an_equals_sign_is_still_a_file(loaded: dict[str, Any], tmp_path: Path) -> None:
    odd = tmp_path / "lr=1.yaml"
    odd.touch()
    ft("train", str(odd))
    assert loaded["file"] == odd


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["trian"], "`ft trian`: no such command", "did you mean `ft train`?"),
        (["nothing-like-it"], "no such command", "commands: train, verify, data, plugins, doctor, completion"),
        (["plugins", "lst"], "`ft plugins lst`: no such command", "did you mean `ft plugins list`?"),
        (["--verson"], "`ft` has no option --verson", "did you mean --version?"),
        (["train", "--lorra"], "`ft train` has no option --lorra", "did you mean --lora?"),
        (["train", "--global_bach", "8"], "has no option --global_bach", "did you mean --global-batch?"),
        # An abbreviation is not an option (PAINS 1).
        (["train", "--learning", "1"], "has no option --learning", "did you mean --learning-rate?"),
        (["train", "-lora"], "has no option -lora", "did you mean --lora?"),
        (["train", "--xyzzy"], "has no option --xyzzy", "`ft train --help` lists the options"),
        (["train", "--adam_beta1", "1"], "has no option --adam_beta1", "--set train.adam_beta1=VALUE"),
        (["train", "--packing"], "has no option --packing", "packing is not in this version"),
        (["train", "--lora=true"], "--lora is a switch and takes no value", "write --lora or --no-lora"),
        (["train", "--lora-r"], "--lora-r needs a value", "write --lora-r N"),
        # PAINS 16: a variable after the command is read by nobody.
        (["train", "NPROC_PER_NODE=2"], "'NPROC_PER_NODE=2'", "write --nproc-per-node 2"),
        (["train", "HF_HOME=/x"], "'HF_HOME=/x'", "a variable stands before the command: HF_HOME=/x ft train"),
        (["train", "model.lora_r=8"], "'model.lora_r=8'", "write --set model.lora_r=8"),
        (["train", "run.yaml", "other.yaml"], "'other.yaml'", "give one run file"),
        (["train", "run.yaml", "--lora", "True"], "'True'", "a switch takes no value"),
        (["train", "--lora", "True", "--model", "x"], "'True'", "a switch takes no value: write --lora or --no-lora"),
        (["train", "LORA=1"], "'LORA=1'", "--lora is a switch: write --lora or --no-lora"),
        (
            ["train", "WANDB_MODE=off"],
            "'WANDB_MODE=off'",
            "a variable stands before the command: WANDB_MODE=off ft train",
        ),
        (["train", "TOKEN=hunter2"], "'TOKEN=***'", "a variable stands before the command: TOKEN=*** ft train"),
        (["train", "LORAR=8"], "'LORAR=8'", "write --lora-r 8"),
        (["data", "preview"], "`ft data preview` needs DATA", "--help"),
        (
            ["data", "preview", "a.jsonl", "--dataset", "b.jsonl"],
            "DATA (a.jsonl) and --dataset (b.jsonl)",
            "one of them",
        ),
        (["completion", "tcsh"], "'tcsh' is not one of", "--help"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_with_a_hint(words: list[str], message: str, hint: str) -> None:
    result = ft(*words)
    assert result.exit_code == ExitCode.USAGE
    assert result.stdout == ""
    error, told = result.stderr.splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert told.startswith("hint: ")
    assert hint in told


@pytest.mark.parametrize("code", list(ExitCode))
def test_a_users_mistake_ends_with_its_own_exit_code(code: ExitCode, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise FtError("2 mistakes", problems=["a.yaml:1: one", "a.yaml:2: two"], hint="mend them", exit_code=code)

    assert guard(fail) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: 2 mistakes\n  a.yaml:1: one\n  a.yaml:2: two\nhint: mend them\n"


def test_a_fault_of_ours_shows_its_traceback_and_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ValueError("a broken invariant")

    assert guard(fail) == ExitCode.TRAINING
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert "this is a fault of Fleettune, not yours: ValueError: a broken invariant" in error


def test_an_interrupt_is_130_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    assert guard(fail) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"


def test_a_run_file_that_does_not_exist_is_told_before_anything_loads() -> None:
    result = ft("train", "no-such-run.yaml")
    assert result.exit_code == ExitCode.CONFIG
    assert "no-such-run.yaml" in result.stderr


def test_version_names_every_distribution_and_python() -> None:
    lines = ft("--version").stdout.splitlines()
    assert lines[0].startswith("ft ")
    assert "(Python 3." in lines[0]
    assert any(line.startswith("fleettune-core ") for line in lines)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_calls_ft(shell: str) -> None:
    script = ft("completion", shell).stdout
    assert "_FT_COMPLETE" in script
    assert "ft" in script


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("ft tr", "train"),
        ("ft train --glob", "--global-batch"),
        ("ft train --launcher to", "torchrun"),
        ("ft train --backend d", "ddp"),
        ("ft train --precision b", "bf16"),
        ("ft train --grad-compression p", "powersgd"),
        ("ft plugins show t", "torchrun"),
        ("ft plugins l", "list"),
        ("ft train --lora_", "--lora_r"),
        ("ft train --lora_target_", "--lora_target_modules"),
        ("ft train --lr-scheduler-type c", "cosine"),
        ("ft train --set tr", "train."),
        ("ft train --set train.", "train.max_steps="),
        ("ft train --set train.adam_b", "train.adam_beta1="),
        ("ft train --set train.lr_scheduler_type=c", "train.lr_scheduler_type=cosine"),
    ],
)
def test_the_shell_completes(line: str, wanted: str) -> None:
    assert f"plain,{wanted}" in completions(line)


def test_the_shell_completes_the_files_of_a_preview() -> None:
    assert "file,go" in completions("ft data preview go")


def completions(line: str) -> list[str]:
    env = {"_FT_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    return CliRunner().invoke(cli, [], prog_name="ft", env=env).stdout.splitlines()


def ft_process(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """`ft` as a process of its own, for what a test runner stands between."""
    command = [sys.executable, "-m", "fleettune_cli", *words]
    options = {"stdout": subprocess.PIPE, **options}
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, **options)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = ft_process("plugins", "list", stdout=full)
    assert done.returncode == ExitCode.TRAINING
    assert done.stderr == "error: the system refused: No space left on device\n"


def test_a_closed_stdout_is_no_fault() -> None:
    command = f'"{sys.executable}" -m fleettune_cli plugins list >&-'
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_current_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f'cd "{gone}" && rmdir "{gone}" && "{sys.executable}" -m fleettune_cli data preview x.jsonl'
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stderr == "error: the system refused: the current folder: No such file or directory\n"
    assert done.returncode == ExitCode.TRAINING


@pytest.mark.parametrize("columns", ["0", "-3", "wide"])
def test_a_width_in_which_nothing_can_be_shown_is_not_used(columns: str) -> None:
    done = ft_process("train", "--help", env={**os.environ, "COLUMNS": columns})
    assert "--learning-rate" in done.stdout


def test_main_is_the_group_and_train_is_a_command() -> None:
    assert entry.main.__module__ == "fleettune_cli.main"
    assert isinstance(train_module.train, click.Command)
