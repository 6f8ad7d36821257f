"""What cannot be planned is told before anything starts: all of it together, with what to type."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from fleettune_core.config.load import read_config
from fleettune_core.errors import ExitCode, FtError
from fleettune_core.plan.mistakes import Mistakes
from fleettune_core.plan.solve import make_plan
from fleettune_core.types import DeviceKind, Devices

CPU = Devices(kind=DeviceKind.CPU, count=1, name="Some CPU", memory_bytes=2**33, bf16=False, bf16_by="", cpu_cores=4)
GPUS = Devices(kind=DeviceKind.CUDA, count=4, name="Some GPU", memory_bytes=2**36, bf16=True, bf16_by="", cpu_cores=32)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 256,
    "tie_word_embeddings": True,
}


@pytest.fixture(autouse=True)
def in_a_folder_with_model_and_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 10)


def refusal(text: str = "", *, devices: Devices = CPU, env: dict[str, str] | None = None, **flags: Any) -> FtError:
    """The error of a plan for a run file with `text` and flags such as `launch__nodes="2"`."""
    Path("run.yaml").write_text(text)
    given = {"model__model": "./llama", "data__dataset": "rows.jsonl", **flags}
    typed = {
        path.replace("__", "."): ("--" + path.rpartition("__")[2].replace("_", "-"), value)
        for path, value in given.items()
        if value is not None
    }
    loaded = read_config(file=Path("run.yaml"), flags=typed, sets=(), env={})
    with pytest.raises(FtError) as caught:
        make_plan(loaded, env=env or {}, devices=devices)
    return caught.value


def test_independent_mistakes_are_told_together() -> None:
    error = refusal(
        "batch: {global_batch: 3}\nbackend: {bucket_md: 3}\n",
        model__model="./lama",
        data__dataset="rows.json",
        launch__nproc_per_node="2",
        train__precision="fp16",
    )
    assert error.exit_code is ExitCode.CONFIG
    assert error.message == "5 mistakes"
    batch, option, precision, model, data = error.problems
    assert batch.startswith("a global batch of 3 rows (run.yaml:1) cannot be dealt evenly to 2 ranks")
    assert option == "run.yaml:2: backend.bucket_md: unknown key (did you mean bucket_mb?)"
    assert precision.startswith("--precision: fp16 does not train on a CPU (hint: --precision fp32")
    assert model.startswith("--model: model ./lama: no such file or folder (did you mean llama?)")
    assert data.startswith("--dataset: no such data file: rows.json (did you mean rows.jsonl?)")


SEVEN = """\
launch:
  launcher: torchrunn
  nods: 2
  nproc_per_node: 2
backend:
  bucket_md: 3
model: ./lama
data: rows.json
batch: {global_batch: 3}
train:
  learning_rat: 1
"""


def test_mistakes_of_every_kind_are_told_in_one_round() -> None:
    error = refusal(SEVEN, model__model=None, data__dataset=None)
    assert error.exit_code is ExitCode.CONFIG
    assert error.message == "7 mistakes in run.yaml"
    assert [problem.partition(" (hint")[0] for problem in error.problems] == [
        "run.yaml:2: no launcher is named 'torchrunn' (did you mean torchrun?)",
        "run.yaml:3: launch.nods: unknown key (did you mean nodes?)",
        "run.yaml:6: backend.bucket_md: unknown key (did you mean bucket_mb?)",
        "run.yaml:7: model ./lama: no such file or folder (did you mean llama?)",
        "run.yaml:8: no such data file: rows.json (did you mean rows.jsonl?)",
        "a global batch of 3 rows (run.yaml:9) cannot be dealt evenly to 2 ranks (2 processes: run.yaml:4)",
        "run.yaml:11: train.learning_rat: unknown key (did you mean learning_rate?)",
    ]


@pytest.mark.parametrize(
    ("text", "flags", "problem"),
    [
        ("model: {modl: ./lama}", {"model__model": None}, "run.yaml:1: model.modl: unknown key (did you mean model?)"),
        ("data: {datset: x}", {"data__dataset": None}, "run.yaml:1: data.datset: unknown key (did you mean dataset?)"),
        ("data: {format: jsn}", {"data__dataset": "odd.jsonl"}, "run.yaml:1: data.format: 'jsn' is not one of "),
        ("batch: {micro_batch: x, global_batch: 3, gradient_accumulation_steps: 2}", {}, "run.yaml:1: batch.micro_"),
        ("launch: {nproc_per_node: x, rdzv_id: a}", {}, "run.yaml:1: launch.nproc_per_node: 'x' is not a whole number"),
        ("launch: {rdzv_endpont: 'h:1'}", {"launch__nodes": "2"}, "run.yaml:1: launch.rdzv_endpont: unknown key (did "),
        ("data: {eval_split: 1, eval_dataset: rows.jsonl}", {}, "run.yaml:1: data.eval_split: eval_dataset is given"),
        ("launch: {launcher: slurmm, partition: a, gpu_kind: b}", {}, "run.yaml:1: no launcher is named 'slurmm'"),
    ],
)
def test_what_follows_from_a_mistake_is_not_told_as_well(text: str, flags: dict[str, Any], problem: str) -> None:
    Path("odd.jsonl").write_text('{"a": 1}\n')
    error = refusal(text + "\n", **flags)
    assert len(error.problems) <= 1
    assert (error.problems or (error.message,))[0].startswith(problem)


def test_the_heading_says_where_all_mistakes_are() -> None:
    assert refusal("train: {sed: 1}\nbackend: {bucket_md: 3}\n").message == "2 mistakes in run.yaml"
    both = refusal("train: {sed: 1}\n", model__model="./lama")
    assert (both.message, both.exit_code) == ("2 mistakes", ExitCode.CONFIG)
    typed = refusal(train__seed="x", launch__launcher="torchrnu")
    assert (typed.message, typed.exit_code) == ("2 mistakes in the command line", ExitCode.USAGE)
    assert refusal("train: {sed: 1}\n").message == "1 mistake in run.yaml"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "config.json is not JSON: "),
        ("[1]", "config.json is not a JSON object"),
        ('{"hidden_size": 8}', "config.json has no model_type"),
    ],
)
def test_a_broken_model_folder_is_refused(content: str, said: str) -> None:
    Path("llama/config.json").write_text(content)
    error = refusal()
    assert error.exit_code is ExitCode.CONFIG
    assert error.message.startswith("--model: model ./llama: ")
    assert said in error.message


def test_a_gguf_file_that_was_cut_short_is_refused() -> None:
    name = b"w" * 8
    tensor = struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 1000, 0, 0)
    Path("m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor + bytes(100))
    error = refusal(model__model="m.gguf")
    assert error.exit_code is ExitCode.CONFIG
    assert "m.gguf is cut short: it has 164 bytes, and its tensors need 4064" in error.message


@pytest.mark.parametrize(
    ("split", "said"),
    [
        ("10", "--eval-split: eval_split 10 keeps 10 of 10 rows: none is left to train on"),
        ("12", "--eval-split: eval_split 12 keeps 12 of 10 rows: none is left to train on"),
        ("0.99", "--eval-split: eval_split 0.99 keeps 10 of 10 rows: none is left to train on"),
        ("1.5", "--eval-split: eval_split is 1.5, which is neither a share of the rows nor a number of them"),
    ],
)
def test_an_evaluation_split_that_leaves_no_rows_is_refused(split: str, said: str) -> None:
    assert refusal(data__eval_split=split).message == said


def test_more_processes_than_a_machine_without_gpus_can_mean_are_refused() -> None:
    error = refusal(launch__nproc_per_node="1000000")
    assert error.exit_code is ExitCode.USAGE
    assert error.message == "--nproc-per-node asks for 1000000 processes, and this machine has 4 CPU cores"


def test_a_run_folder_that_cannot_be_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("t.txt").write_text("")
    here = Path.cwd()
    below_a_file = refusal(run_dir="t.txt/x/y").message
    assert below_a_file == f"--run-dir: the run folder {here}/t.txt/x/y cannot be made: {here}/t.txt is a file"
    # An administrator may write anywhere, and tests may be run by one.
    monkeypatch.setattr(os, "access", lambda path, _mode: path != here)
    closed = refusal(run_dir="a/b").message
    assert closed == f"--run-dir: the run folder {here}/a/b cannot be made: {here} may not be written to"


def test_one_mistake_stays_as_it_is() -> None:
    error = refusal(data__dataset="rows.json")
    assert error.message.startswith("--dataset: no such data file: rows.json")
    assert error.problems == ()


def test_mistakes_of_the_command_line_alone_are_exit_2() -> None:
    error = refusal(launch__nodes="many", backend__backend="dpp")
    assert error.exit_code is ExitCode.USAGE
    error = refusal(launch__launcher="torchrnu", backend__backend="dpp")
    assert error.exit_code is ExitCode.USAGE
    assert [problem.partition(" (hint")[0] for problem in error.problems] == [
        "--launcher: no launcher is named 'torchrnu' (did you mean torchrun?)",
        "--backend: no backend is named 'dpp' (did you mean ddp?)",
    ]


def test_more_processes_than_gpus_name_the_gpus() -> None:
    error = refusal(devices=GPUS, launch__nproc_per_node="8")
    assert error.exit_code is ExitCode.USAGE
    assert error.message == "--nproc-per-node asks for 8 processes, and this machine has 4 GPUs (Some GPU)"
    assert error.hint == "--nproc-per-node 4: one process drives one GPU"
    assert refusal("launch: {nproc_per_node: 8}\n", devices=GPUS).exit_code is ExitCode.CONFIG


@pytest.mark.parametrize("nodes", ["many", "0", "3:2", "1:2:3", "-1", "1.5"])
def test_nodes_are_a_number_or_a_range(nodes: str) -> None:
    error = refusal(launch__nodes=nodes)
    assert error.message == f"--nodes: nodes is {nodes!r}, which is neither a number of machines nor MIN:MAX"
    assert error.exit_code is ExitCode.USAGE


def test_the_local_launcher_sends_several_processes_to_torchrun() -> None:
    error = refusal(launch__launcher="local", launch__nproc_per_node="2")
    assert "--launcher torchrun" in (error.hint or "")


def test_several_machines_need_a_place_to_meet() -> None:
    error = refusal(launch__nodes="2")
    assert any("--rdzv-endpoint HOST:PORT" in problem for problem in error.problems)
    assert "--rdzv-endpoint HOST-OF-MACHINE-0:29500" in (error.hint or "")


def test_a_node_rank_beyond_the_machines_is_refused() -> None:
    error = refusal(launch__nodes="2", launch__node_rank="2", launch__rdzv_endpoint="host:29500")
    assert error.problems == ("--node-rank 2: with --nodes 2 it goes from 0 to 1",)


def test_the_launcher_is_heard_beside_other_mistakes() -> None:
    error = refusal(launch__launcher="local", launch__nproc_per_node="2", model__model="./lama")
    assert len(error.problems) == 2
    assert error.problems[1].startswith("the launcher local starts one process")


def test_a_run_folder_that_is_used_is_refused() -> None:
    Path("used").mkdir()
    Path("used/run.json").write_text("{}")
    assert "exists and is not empty" in refusal(run_dir="used").message
    Path("file").write_text("")
    assert "is a file, and the run needs a folder" in refusal(run_dir="file").message


def test_the_layout_of_ranks_that_exist_cannot_be_asked_for_anew() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    error = refusal(env=env, launch__nproc_per_node="4", launch__nodes="3", run_dir="there")
    assert error.exit_code is ExitCode.USAGE
    assert error.problems == ("--nproc-per-node: 4 processes per node, but 2", "--nodes: 3 nodes, but 1")
    assert refusal("launch: {nproc_per_node: 4}\n", env=env, run_dir="there").exit_code is ExitCode.CONFIG


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("launch: {nodez: 2}", "run.yaml:1: launch.nodez: unknown key (did you mean nodes?)"),
        (
            "launch: {global_batch: 2}",
            "run.yaml:1: launch.global_batch: unknown key; global_batch belongs under batch:",
        ),
        ("launch: {launcher: local, xyzzy: 2}", "run.yaml:1: launch.xyzzy: launcher local has no option of that name"),
        (
            "backend: {xyzzy: 2}",
            "run.yaml:1: backend.xyzzy: backend ddp has no option of that name; its options: grad_",
        ),
    ],
)
def test_a_key_that_neither_core_nor_the_plugin_has_is_refused(text: str, said: str) -> None:
    error = refusal(text + "\n")
    assert error.message.startswith(said)
    assert error.exit_code is ExitCode.CONFIG


def test_a_value_that_a_plugin_does_not_take_is_refused_at_its_place() -> None:
    (problem,) = refusal("backend:\n  grad_compression: zip\n").problems
    assert problem.startswith("run.yaml:2: grad_compression is 'zip', but must be one of none, bf16, powersgd")
    typed = refusal(backend__grad_compression="zip")
    assert typed.exit_code is ExitCode.USAGE
    assert typed.problems[0].startswith("--grad-compression: ")


def test_adapter_targets_that_the_model_does_not_have_are_refused() -> None:
    error = refusal(model__lora=True, model__lora_target="q_prj,v_proj")
    assert error.exit_code is ExitCode.USAGE
    assert error.message == (
        "--lora-target: lora_target names 'q_prj' (did you mean q_proj?), which a llama model does not have"
    )
    assert "--lora-target all-linear, or some of q_proj," in (error.hint or "")


def test_collected_mistakes_keep_their_own_exit_code_where_they_share_one() -> None:
    mistakes = Mistakes()
    with mistakes:
        raise FtError("one", exit_code=ExitCode.PLUGIN, hint="do this")
    with mistakes:
        raise FtError("two", exit_code=ExitCode.PLUGIN, problems=["a", "b"])
    with pytest.raises(FtError) as caught:
        mistakes.raise_all()
    assert caught.value.exit_code is ExitCode.PLUGIN
    assert caught.value.problems == ("one (hint: do this)", "two: a", "two: b")
    with mistakes:
        raise FtError("three", exit_code=ExitCode.USAGE)
    with pytest.raises(FtError) as caught:
        mistakes.raise_all()
    assert caught.value.exit_code is ExitCode.CONFIG


def test_what_is_not_a_users_mistake_is_not_collected() -> None:
    with pytest.raises(ZeroDivisionError), Mistakes():
        1 / 0  # noqa: B018
