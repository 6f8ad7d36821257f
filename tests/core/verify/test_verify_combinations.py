"""What `--layouts` and `--backends` may say, and the plans that follow. Nothing is started."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import pytest

from fleettune_core.config.load import read_config
from fleettune_core.errors import ExitCode, FtError
from fleettune_core.plugins.catalog import load_catalog
from fleettune_core.types import DeviceKind, Devices
from fleettune_core.verify.combinations import (
    ProcessLayout,
    Verification,
    parse_backends,
    parse_layouts,
    plan_verification,
)

CPU = Devices(kind=DeviceKind.CPU, count=1, name="a CPU", memory_bytes=1 << 34, cpu_cores=2, bf16=True)
NOW = datetime(2026, 1, 2, tzinfo=timezone.utc)


def test_layouts_are_processes_times_accumulation():
    assert parse_layouts("1x1, 2x4") == (ProcessLayout(1, 1), ProcessLayout(2, 4))


@pytest.mark.parametrize("text", ["2", "0x1", "1x0", "axb", "1x1,1x1", "", "2x-1"])
def test_a_layout_that_is_none_is_refused_with_exit_code_2(text):
    with pytest.raises(FtError) as caught:
        parse_layouts(text)
    assert caught.value.exit_code == ExitCode.USAGE
    assert caught.value.message.startswith("--layouts: ")


def test_a_value_behind_a_colon_is_the_backends_first_option_and_others_are_named():
    ddp, zero, offloaded = parse_backends(
        "ddp,deepspeed:3,deepspeed:zero_stage=2:offload-optimizer=cpu", load_catalog()
    )
    assert (ddp.name, dict(ddp.options)) == ("ddp", {})
    assert (zero.name, dict(zero.options)) == ("deepspeed", {"zero_stage": 3})
    assert dict(offloaded.options) == {"zero_stage": 2, "offload_optimizer": "cpu"}


@pytest.mark.parametrize("text", ["nope", "ddp:", "ddp:colour=red", "deepspeed:3,deepspeed:3", "", "fsdp:shard_group="])
def test_a_backend_that_cannot_be_meant_is_refused_with_exit_code_2(text):
    with pytest.raises(FtError) as caught:
        parse_backends(text, load_catalog())
    assert caught.value.exit_code == ExitCode.USAGE
    assert caught.value.message.startswith("--backends")


@pytest.fixture
def planned(tiny_model, tiny_rows, tmp_path, monkeypatch):
    """A function that plans a verification of a run file with `text` behind the model and the data."""
    monkeypatch.chdir(tmp_path)

    def plan(text: str, layouts: str, backends: str, env=None, **flags: str) -> Verification:
        file = Path("run.yaml")
        file.write_text(f"model: {{model: {tiny_model}, lora: true, lora_dropout: 0.1}}\ndata: {tiny_rows}\n{text}")
        catalog = load_catalog()
        said = {name.replace("__", "."): (f"--{name}", value) for name, value in flags.items()}
        return plan_verification(
            read_config(file=file, flags=said, sets=(), env=env or {}),
            layouts=parse_layouts(layouts),
            backends=parse_backends(backends, catalog),
            steps=3,
            env=env or {},
            catalog=catalog,
            devices=CPU,
            now=NOW,
        )

    return plan


def test_every_combination_has_the_runs_global_batch_cut_as_its_layout_says(planned):
    found = planned("batch: {global_batch: 24}\n", "1x1,2x3", "ddp,fsdp").combinations
    assert [item.title for item in found] == ["ddp 1x1", "fsdp 1x1", "ddp 2x3", "fsdp 2x3"]
    cut = [(item.plan.batch.micro_batch, item.plan.batch.accumulation, item.plan.batch.ranks) for item in found]
    assert cut == [(24, 1, 1)] * 2 + [(4, 3, 2)] * 2
    assert [item.plan.launcher.name for item in found] == ["local", "local", "torchrun", "torchrun"]


def test_a_global_batch_that_follows_from_a_layout_that_is_not_here_is_kept(planned):
    run = "launch: {nodes: 2, nproc_per_node: 4}\nbatch: {micro_batch: 2, gradient_accumulation_steps: 3}\n"
    found = planned(run, "1x1", "ddp")
    assert found.combinations[0].plan.batch.global_batch == 2 * 3 * 8
    assert "on this machine, whatever the run says under launch:" in found.notes


def test_what_would_hide_or_make_differences_is_left_out_and_said(planned):
    run = "train: {warmup_steps: 100, epochs: 3, precision: bf16}\ncheckpoint: {save_every: 1}\n"
    found = planned(run, "1x1", "ddp")
    config = found.combinations[0].plan.config
    assert (config.train.warmup_steps, config.train.max_steps, config.train.precision) == (0, 3, "fp32")
    assert config.model.lora_dropout == 0
    assert config.checkpoint.save_every is None
    assert [note.split()[0] + " " + note.split()[1] for note in found.notes] == [
        "compared in",
        "without dropout:",
        "without warm-up,",
    ]


def test_a_precision_on_the_command_line_is_compared(planned):
    assert planned("", "1x1", "ddp", train__precision="bf16").precision == "bf16"
    assert planned("", "1x1", "ddp", train__precision="auto").precision == "bf16"


def test_options_in_the_run_file_belong_to_its_own_backend_alone(planned):
    run = "backend: {backend: deepspeed, zero_stage: 1, offload_optimizer: cpu}\n"
    ddp, zero = planned(run, "1x1", "ddp,deepspeed:3").combinations
    assert dict(ddp.plan.config.backend_options) == {}
    assert dict(zero.plan.config.backend_options) == {"zero_stage": 3, "offload_optimizer": "cpu"}


def test_a_variable_that_chooses_a_backend_does_not_replace_those_that_are_compared(planned):
    (found,) = planned("", "1x1", "ddp", env={"FT_BACKEND": "fsdp", "FT_LAUNCHER": "slurm"}).combinations
    assert (found.plan.backend.name, found.plan.launcher.name) == ("ddp", "local")


def test_a_mistake_of_several_combinations_is_told_once(planned):
    with pytest.raises(FtError) as caught:
        planned("batch: {global_batch: 8}\n", "3x1", "ddp,fsdp,deepspeed")
    assert caught.value.message.startswith("a global batch of 8 rows (--layouts 3x1)")
    assert caught.value.exit_code == ExitCode.CONFIG


def test_mistakes_of_different_layouts_are_told_together(planned):
    with pytest.raises(FtError) as caught:
        planned("batch: {global_batch: 8}\n", "3x1,5x1", "ddp,fsdp")
    assert len(caught.value.problems) == 2


def test_a_rank_of_another_launcher_does_not_start_a_verification(planned):
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    with pytest.raises(FtError, match="rank 0 of 2"):
        planned("", "1x1", "ddp", env={**ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"})


def test_run_folders_lie_side_by_side_in_the_verifications_own(planned, tmp_path):
    found = planned("", "1x1", "ddp,deepspeed:3")
    assert found.folder.parent == tmp_path / "runs"
    assert found.folder.name.endswith("verify-20260102-000000")
    folders = [item.plan.run_dir.relative_to(found.folder).name for item in found.combinations]
    assert folders == ["ddp-1x1", "deepspeed-3-1x1"]
