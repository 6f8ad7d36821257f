"""Config and detections become a plan: what is decided where nobody said anything, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from fleettune_core.config.load import load_config
from fleettune_core.config.source import LoadedConfig
from fleettune_core.errors import ExitCode, FtError
from fleettune_core.plan.model import Plan
from fleettune_core.plan.record import read_run_record, run_record
from fleettune_core.plan.serialise import to_dict
from fleettune_core.plan.solve import make_plan
from fleettune_core.plugins.catalog import load_catalog
from fleettune_core.types import DeviceKind, Devices

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
CPU = Devices(
    kind=DeviceKind.CPU, count=1, name="Some CPU", memory_bytes=8 * 2**30, bf16=False, bf16_by="", cpu_cores=4
)
GPUS = Devices(
    kind=DeviceKind.CUDA,
    count=4,
    name="Some GPU",
    memory_bytes=80 * 2**30,
    bf16=True,
    bf16_by="compute capability 9.0",
    cpu_cores=32,
)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
RANK_OF_TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29999",
    "TORCHELASTIC_RUN_ID": "job-7",
}


@pytest.fixture(autouse=True)
def in_a_folder_with_model_and_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 10)


def load(text: str = "", **flags: Any) -> LoadedConfig:
    """A run file with model, data and `text`; flags as `launch__nodes="2"`."""
    Path("run.yaml").write_text("model: {model: ./llama}\ndata: rows.jsonl\n" + text)
    typed = {path.replace("__", "."): ("--" + path.partition("__")[2], value) for path, value in flags.items()}
    return load_config(file=Path("run.yaml"), flags=typed, sets=(), env={})


def plan_of(text: str = "", *, devices: Devices = CPU, env: Mapping[str, str] | None = None, **flags: Any) -> Plan:
    return make_plan(
        load(text, **flags), env=env or {}, devices=devices, catalog=load_catalog(), now=NOW, python="/usr/bin/python"
    )


def test_one_process_on_a_cpu_and_one_per_gpu() -> None:
    assert (plan_of().launcher.name, plan_of().layout.ranks) == ("local", 1)
    on_gpus = plan_of(devices=GPUS)
    assert (on_gpus.launcher.name, on_gpus.layout.ranks) == ("torchrun", 4)
    assert on_gpus.batch.reasons["ranks"] == "4 processes: one per GPU"


def test_the_worker_command_is_what_the_launcher_starts() -> None:
    plan = plan_of(run_dir="there")
    assert plan.launch is not None
    folder = str(Path("there").absolute())
    assert plan.launch.argv == ("/usr/bin/python", "-m", "fleettune_core.worker", folder)
    assert dict(plan.launch.environment) == {"OMP_NUM_THREADS": "4", "HF_HUB_DISABLE_TELEMETRY": "1"}


def test_a_choice_about_telemetry_is_the_users() -> None:
    plan = plan_of(env={"HF_HUB_DISABLE_TELEMETRY": "0"})
    assert plan.launch is not None
    assert "HF_HUB_DISABLE_TELEMETRY" not in plan.launch.environment


def test_cores_are_divided_among_the_ranks_of_a_machine() -> None:
    assert plan_of(launch__nproc_per_node="2").threads_per_rank == 2
    many = plan_of(launch__nproc_per_node="8")
    assert many.threads_per_rank == 1
    assert "8 processes share 4 CPU cores: they will be slower than fewer" in many.warnings


def test_a_thread_count_of_the_environment_is_not_replaced_in_silence() -> None:
    plan = plan_of(env={"OMP_NUM_THREADS": "1"})
    assert "OMP_NUM_THREADS=1 of the environment becomes 4 for the workers" in plan.notes


def test_values_that_nobody_said_are_filled_in_with_their_source() -> None:
    plan = plan_of("train: {seed: 1}\n")
    config = plan.config
    assert (config.train.learning_rate, config.train.epochs) == (2e-5, 1.0)
    assert (config.launch.launcher, config.launch.nodes, config.launch.nproc_per_node) == ("local", "1", 1)
    assert (config.batch.global_batch, config.batch.micro_batch) == (8, 8)
    assert (config.backend.backend, config.model.lora_alpha, config.model.lora_target) == ("ddp", None, None)
    assert plan.sources["train.learning_rate"].kind == "default"
    assert plan.sources["batch.micro_batch"].kind == "solved"
    assert plan.sources["train.seed"].where == "run.yaml:3"


def test_lora_has_defaults_of_its_own() -> None:
    config = plan_of(model__lora=True, model__lora_r="8").config
    assert (config.train.learning_rate, config.model.lora_alpha, config.model.lora_target) == (2e-4, 16.0, "all-linear")


def test_max_steps_leave_epochs_unsaid_and_win_over_them() -> None:
    assert plan_of("train: {max_steps: 5}\n").config.train.epochs is None
    both = plan_of("train: {max_steps: 5, epochs: 2}\n")
    assert "max_steps 5 wins over epochs 2" in both.notes


def test_local_files_become_absolute_for_a_worker_that_starts_elsewhere() -> None:
    config = plan_of().config
    assert config.model.model == str(Path("llama").resolve())
    assert config.data.dataset == str(Path("rows.jsonl").absolute())


def test_the_run_is_named_after_name_or_model_method_and_clock() -> None:
    plan = plan_of()
    assert plan.run_id == "llama-sft-20260102-030405"
    assert plan.run_dir == Path("runs/llama-sft-20260102-030405").absolute()
    assert plan_of(name="my run/1").run_id == "my-run-1-sft-20260102-030405"


def test_a_run_of_the_same_second_gets_another_folder() -> None:
    plan_of().run_dir.mkdir(parents=True)
    assert plan_of().run_id == "llama-sft-20260102-030405-2"


def test_the_data_and_the_precision_are_said_with_their_reason() -> None:
    plan = plan_of()
    assert plan.data is not None
    assert (plan.data.format, plan.data.rows) == ("prompt-completion", 10)
    assert (plan.precision.name, plan_of(devices=GPUS).precision.name) == ("fp32", "bf16")
    assert plan.precision.reason.startswith("auto: ")


def test_memory_is_estimated_where_the_shape_is_known() -> None:
    plan = plan_of()
    assert plan.memory is not None
    assert plan.memory.total > plan.memory.weights > 0
    unknown = make_plan(
        load_config(
            file=None,
            flags={"model.model": ("--model", "nobody/nothing"), "data.dataset": ("--dataset", "rows.jsonl")},
            sets=(),
            env={},
        ),
        env={"HF_HOME": str(Path("empty").absolute())},
        devices=CPU,
        now=NOW,
    )
    assert unknown.memory is None
    assert unknown.memory_unknown == "nobody/nothing is not on this machine yet"


def test_what_will_not_fit_is_told_before_the_run() -> None:
    small = Devices(kind=DeviceKind.CPU, count=1, name="Small", memory_bytes=2**20, bf16=False, bf16_by="", cpu_cores=1)
    (warning,) = plan_of(devices=small, data__max_length="64").warnings
    assert warning.startswith("up to 0.0 GiB are needed, and this machine has 0.0 GiB; a smaller --micro-batch")
    assert "max_length 1024 is beyond the 512 positions of llama" in plan_of().warnings


def test_a_plan_is_json_under_the_names_of_its_fields() -> None:
    plan = plan_of(launch__nproc_per_node="2")
    tree = json.loads(json.dumps(to_dict(plan)))
    assert tree["layout"] == {"min_nodes": 1, "max_nodes": 1, "procs_per_node": 2, "ranks": 2}
    assert tree["batch"]["equation"] == "8 rows = 4 per micro-batch × 1 accumulation × 2 ranks"
    assert tree["config"]["train"]["seed"] == 42
    assert tree["launch"]["argv"] == list(plan.launch.argv if plan.launch else ())
    assert tree["memory"]["total"] == (plan.memory.total if plan.memory else None)
    assert tree["sources"]["launch.nproc_per_node"] == {"kind": "flag", "where": "--nproc_per_node", "beat": []}


def test_what_a_worker_reads_is_what_was_planned() -> None:
    text = (
        "model: {model: ./llama, lora: true, lora_dropout: 0.1}\ndata: rows.jsonl\n"
        "train: {adam_beta1: 0.8, lr_scheduler_kwargs: {a: [1, {b: null}]}, warmup_steps: 0.1}\n"
        "backend: {bucket_mb: 3, grad_compression: bf16}\nlaunch: {nproc_per_node: 2, join_timeout_seconds: 9}\n"
    )
    Path("whole.yaml").write_text(text)
    flags = {"train.seed": ("--seed", "3")}
    loaded = load_config(file=Path("whole.yaml"), flags=flags, sets=("train.adam_beta1=0.7",), env={})
    plan = make_plan(loaded, env={}, devices=CPU, now=NOW)
    record = read_run_record(json.loads(json.dumps(run_record(plan))))
    assert record.config == plan.config
    assert dict(record.config.train.extra) == {"adam_beta1": 0.7, "lr_scheduler_kwargs": {"a": [1, {"b": None}]}}
    assert dict(record.config.backend_options) == {"bucket_mb": 3, "grad_compression": "bf16"}
    assert dict(record.config.launcher_options) == {"join_timeout_seconds": 9}
    assert record.sources == plan.sources
    assert record.sources["train.adam_beta1"].beat == (("whole.yaml:3", 0.8),)
    assert (record.launcher, record.backend, record.layout, record.batch) == (
        plan.launcher,
        plan.backend,
        plan.layout,
        plan.batch,
    )
    assert (record.precision, record.device_kind, record.threads_per_rank) == ("fp32", DeviceKind.CPU, 2)
    assert record.run_id == plan.run_id


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 2}, "run.json has the format 2, and this version reads 1"),
        ({"batch": {}}, "run.json is incomplete or was changed by hand"),
        ({"config": {}}, "run.json is incomplete or was changed by hand"),
    ],
)
def test_a_record_that_cannot_be_followed_is_refused(change: dict[str, Any], said: str) -> None:
    content = {**json.loads(json.dumps(run_record(plan_of()))), **change}
    with pytest.raises(FtError, match=said):
        read_run_record(content)


def test_a_rank_that_exists_already_launches_nothing() -> None:
    plan = plan_of(env=RANK_OF_TORCHRUN, run_dir="there")
    assert plan.launch is None
    assert plan.process is not None
    assert (plan.process.rank, plan.layout.ranks) == (1, 2)
    assert plan.batch.reasons["ranks"] == "this process is rank 1 of 2"


def test_ranks_that_exist_agree_on_a_folder_by_the_name_of_their_group() -> None:
    first = plan_of(env={**RANK_OF_TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"})
    assert first.run_id == "llama-sft-job-7"
    first.run_dir.mkdir(parents=True)
    (first.run_dir / "run.json").write_text("{}")
    assert plan_of(env=RANK_OF_TORCHRUN).run_dir == first.run_dir


def test_ranks_without_a_common_name_need_a_folder() -> None:
    with pytest.raises(FtError, match="nothing tells the ranks a common run folder") as caught:
        plan_of(env={**RANK_OF_TORCHRUN, "TORCHELASTIC_RUN_ID": "none"})
    assert caught.value.exit_code is ExitCode.USAGE
    assert "--run-dir" in (caught.value.hint or "")


def test_a_rank_of_one_is_named_by_the_clock() -> None:
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    plan = plan_of(env=alone)
    assert plan.run_id == "llama-sft-20260102-030405"
    assert plan.launch is None


def test_machines_that_are_started_by_hand_are_told_about_their_folders() -> None:
    flags = {"launch__nodes": "2", "launch__rdzv_endpoint": "host:29500"}
    assert any("--run-dir" in note for note in plan_of(**flags).notes)
    assert not any("--run-dir" in note for note in plan_of(**flags, run_dir="shared").notes)


@pytest.mark.parametrize("node_rank", ["0", "1"])
def test_a_machine_finds_the_folder_that_another_has_made(node_rank: str) -> None:
    Path("shared/logs").mkdir(parents=True)
    flags = {"launch__nodes": "2", "launch__rdzv_endpoint": "host:29500", "run_dir": "shared"}
    assert plan_of(**flags, launch__node_rank=node_rank).run_dir == Path("shared").absolute()


def test_an_elastic_run_is_planned_for_its_largest_size() -> None:
    plan = plan_of(launch__nodes="1:4", launch__rdzv_endpoint="host:29500", launch__max_restarts="3")
    assert (plan.layout.min_nodes, plan.layout.max_nodes, plan.batch.ranks) == (1, 4, 4)
    assert plan.config.launch.nodes == "1:4"
    assert "8 rows cannot be dealt to 3 nodes × 1: the run would end at that size" in plan.warnings


def test_fewer_processes_than_gpus_are_said() -> None:
    assert "2 of this machine's 4 GPUs are used" in plan_of(devices=GPUS, launch__nproc_per_node="2").notes
    one = plan_of(devices=GPUS, launch__launcher="local")
    assert one.layout.ranks == 1
    assert "1 of this machine's 4 GPUs are used" in one.notes


def test_the_ranks_of_a_cpu_share_its_memory_and_a_gpu_has_its_own() -> None:
    needed = plan_of(launch__nproc_per_node="2").memory
    assert needed is not None
    room = {"memory_bytes": needed.total * 3 // 2, "bf16": False, "bf16_by": "", "cpu_cores": 4}
    cpu = Devices(kind=DeviceKind.CPU, count=1, name="C", **room)
    gpus = Devices(kind=DeviceKind.CUDA, count=2, name="G", **room)
    on_cpu = plan_of(devices=cpu, launch__nproc_per_node="2").warnings
    on_gpus = plan_of(devices=gpus, launch__nproc_per_node="2").warnings
    assert [line for line in on_cpu if "for 2 ranks" in line]
    assert not [line for line in on_gpus if "are needed" in line]


NO_EFFECT = [
    ({"model__revision": "v2"}, "revision (--revision) has no effect here: llama is read from this machine's files"),
    (
        {"data__dataset_split": "test"},
        "dataset_split (--dataset_split) has no effect here: the rows are read from files",
    ),
    (
        {"data__dataset_config": "en"},
        "dataset_config (--dataset_config) has no effect here: the rows are read from files",
    ),
    (
        {"checkpoint__keep_checkpoints": "2"},
        "keep_checkpoints (--keep_checkpoints) has no effect here: without --save-every there are no checkpoints",
    ),
    (
        {"backend__grad_compression": "bf16"},
        "grad_compression (--grad_compression) has no effect here: one rank exchanges no gradients",
    ),
]


@pytest.mark.parametrize(("flags", "note"), NO_EFFECT)
def test_a_setting_without_effect_is_not_ignored_in_silence(flags: dict[str, str], note: str) -> None:
    assert plan_of(**flags).notes == (note,)


def test_a_setting_with_effect_needs_no_note() -> None:
    plan = plan_of(
        checkpoint__keep_checkpoints="2",
        checkpoint__save_every="1",
        backend__grad_compression="bf16",
        launch__nproc_per_node="2",
    )
    assert plan.notes == ()
    hub = load(model__revision="v2", data__dataset_split="test", model__model="org/model", data__dataset="org/rows")
    assert make_plan(hub, env={}, devices=CPU).notes == ()


def test_64_processes_a_core_are_the_most() -> None:
    assert plan_of(launch__nproc_per_node="256", batch__global_batch="256").layout.ranks == 256
    with pytest.raises(FtError, match="asks for 257 processes"):
        plan_of(launch__nproc_per_node="257", batch__global_batch="257")
