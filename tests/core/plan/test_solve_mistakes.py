"""What cannot be planned is told before anything starts: all of it together, with what to type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleettune_core.config.load import load_config
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
    }
    loaded = load_config(file=Path("run.yaml"), flags=typed, sets=(), env={})
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
    batch, precision, model, data, option = error.problems
    assert batch.startswith("a global batch of 3 rows (run.yaml:1) cannot be dealt evenly to 2 ranks")
    assert precision.startswith("fp16 does not train on a CPU (hint: --precision fp32")
    assert model.startswith("model ./lama: no such file or folder (did you mean llama?)")
    assert data.startswith("no such data file: rows.json (did you mean rows.jsonl?)")
    assert option == "run.yaml:2: backend.bucket_md: unknown key (did you mean bucket_mb?)"


def test_one_mistake_stays_as_it_is() -> None:
    error = refusal(data__dataset="rows.json")
    assert error.message.startswith("no such data file: rows.json")
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
