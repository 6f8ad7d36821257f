"""Optimizer state and weights on a disk: the same numbers as ddp's, no file left, and compiling is announced."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

import pytest

from system_packages import need_libaio
from tiny_model import make_tiny_model
from train_runs import Training, loss_distance, train, weight_distance

STEPS = 4
# AdamW's epsilon is raised: by its default, the update of a weight without a gradient is nothing but noise of rounding.
SAME = ["--max-steps", str(STEPS), "--set", "train.adam_epsilon=1e-4", "--save-every", "3", "--eval-split", "0.2"]
KINDS = {"full": ["--precision", "fp32"], "lora": ["--precision", "fp32", "--lora", "--lora-r", "8"]}
LAYOUTS = {
    "alone": ["--nproc-per-node", "1", "--micro-batch", "4"],
    "split": ["--nproc-per-node", "2", "--micro-batch", "2"],
}
OFFLOADS = {
    "all": ["--offload-optimizer", "nvme", "--offload-params", "nvme"],
    "optimizer": ["--offload-optimizer", "nvme"],
    "params": ["--offload-params", "nvme"],
    "params, optimizer in memory": ["--offload-optimizer", "cpu", "--offload-params", "nvme"],
}
CASES = [
    *((kind, "all", layout) for kind in KINDS for layout in LAYOUTS),
    *(("full", name, "split") for name in OFFLOADS if name != "all"),
]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("libaio")]


@pytest.fixture(scope="module")
def libaio() -> None:
    need_libaio()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough that a rank's share of a weight is more than a MiB: DeepSpeed keeps less than that in memory."""
    return make_tiny_model(tmp_path_factory.mktemp("wide"), hidden_size=512, intermediate_size=2048)


@pytest.fixture(scope="module")
def runs(libaio, model, tiny_rows, tmp_path_factory):
    """A function that gives the training of a kind, what it offloads (None: ddp) and a layout; each is run once."""
    folder = tmp_path_factory.mktemp("nvme")
    disk = folder / "disk"
    disk.mkdir()
    # Small sub groups, so that several of them take turns in the buffers.
    config = folder / "ds.json"
    config.write_text('{"zero_optimization": {"sub_group_size": 1000000}}')
    made: dict[str, Training] = {}

    def run(kind: str, offload: str | None = None, layout: str = "alone") -> Training:
        name = f"{kind}-{offload}-{layout}"
        if name not in made:
            backend = ["--backend", "ddp"]
            if offload is not None:
                backend = ["--backend", "deepspeed", "--zero-stage", "3", "--nvme-path", str(disk), *OFFLOADS[offload]]
                backend += ["--deepspeed-config", str(config)]
            words = ["--model", str(model), "--dataset", str(tiny_rows), "--global-batch", "8", *SAME, *KINDS[kind]]
            environment = {"FT_CACHE_DIR": str(folder / "cache")}
            made[name] = train(folder / name, *words, *backend, *LAYOUTS[layout], environment=environment)
            assert made[name].exit_code == 0, f"{name}:\n{made[name].stderr}"
            assert [path.name for path in disk.iterdir() if path.is_dir()] == []
        return made[name]

    return run


@pytest.mark.parametrize(("kind", "offload", "layout"), CASES)
class TestSameNumbers:
    """Against ddp on one process."""

    def test_losses_agree_step_by_step(self, runs, kind, offload, layout):
        ours = runs(kind, offload, layout)
        assert len(ours.losses) == STEPS
        assert loss_distance(runs(kind), ours) < 1e-5

    def test_saved_weights_agree(self, runs, kind, offload, layout):
        assert weight_distance(runs(kind), runs(kind, offload, layout)) < 1e-6

    def test_optimizer_state_agrees(self, runs, kind, offload, layout):
        ours, reference = optimizer_state(runs(kind, offload, layout)), optimizer_state(runs(kind))
        assert ours.keys() == reference.keys()
        distances = [
            float((ours[name] - value).abs().max()) for name, value in reference.items() if hasattr(value, "shape")
        ]
        assert distances
        assert max(distances) < 1e-6

    def test_evaluation_agrees(self, runs, kind, offload, layout):
        ours, reference = (
            [line["eval_loss"] for line in run.metrics if "eval_loss" in line]
            for run in (runs(kind, offload, layout), runs(kind))
        )
        assert ours == pytest.approx(reference, rel=1e-5)


def optimizer_state(run: Training) -> dict[str, object]:
    """The checkpoint's optimizer state by parameter name."""
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    folder = run.folder / "checkpoints" / "step-000003" / "optimizer"
    return _load_state_dict_from_keys(checkpoint_id=folder)["optimizer"]


def arguments(model: Path, rows: Path, disk: Path) -> list[str]:
    words = ["--model", str(model), "--dataset", str(rows), "--global-batch", "4", "--nproc-per-node", "1"]
    words += [*SAME, *KINDS["full"], "--backend", "deepspeed", "--zero-stage", "3", "--nvme-path", str(disk)]
    return [*words, *OFFLOADS["all"]]


def test_two_runs_at_once_on_one_disk_do_not_mix(model, tiny_rows, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    results: dict[str, Training] = {}

    environment = {"FT_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}

    def start(name: str, rate: str) -> None:
        words = [*arguments(model, tiny_rows, disk), "--learning-rate", rate]
        results[name] = train(tmp_path / name / "run", *words, environment=environment)

    rates = {"slow": "1e-5", "fast": "1e-3"}
    threads = [threading.Thread(target=start, args=pair) for pair in rates.items()]
    for thread in threads:
        thread.start()
    written: set[tuple[str, str]] = set()
    while any(thread.is_alive() for thread in threads):
        written |= {(path.parts[len(disk.parts)], path.parent.parent.name) for path in disk.rglob("*.swp")}
        time.sleep(0.1)
    assert len({folder for folder, _ in written}) == 2
    assert {kind for _, kind in written} == {"float32params", "optimizer"}
    assert {name: run.exit_code for name, run in results.items()} == {"slow": 0, "fast": 0}
    start("again", rates["fast"])
    assert results["again"].losses == pytest.approx(results["fast"].losses, rel=1e-6)
    assert results["slow"].losses[-1] > results["fast"].losses[-1] + 0.1


def test_compiling_is_announced_while_it_lasts_and_once(model, tiny_rows, tmp_path):
    """Into a folder that holds nothing yet: the compiler is a script that fails, so this takes seconds."""
    compiler = tmp_path / "c++"
    real = subprocess.run(["which", "c++"], capture_output=True, text=True, check=True).stdout.strip()
    # DeepSpeed's probe for libaio passes, and its sources do not.
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *csrc/*) echo "no compiling today" >&2; exit 1;; esac\nexec {real} "$@"\n'
    )
    compiler.chmod(0o755)
    disk = tmp_path / "disk"
    disk.mkdir()
    extensions = tmp_path / "extensions"
    environment = {"TORCH_EXTENSIONS_DIR": str(extensions), "CXX": str(compiler)}
    run = train(
        tmp_path / "run",
        *arguments(model, tiny_rows, disk),
        *LAYOUTS["split"],
        environment={**environment, "FT_CACHE_DIR": str(tmp_path / "cache")},
    )
    assert run.exit_code == 5
    lines = run.stderr.splitlines()
    said = [line for line in lines if line.startswith("compiling")]
    assert len(said) == 1
    assert said[0].startswith("compiling DeepSpeed's pin_memory and async_io, once (about ")
    assert said[0].endswith(f"; it is kept in {extensions}")
    assert any("DeepSpeed's operation pin_memory could not be compiled" in line for line in lines)
    assert "no compiling today" in next((run.folder / "logs").glob("*.rank0.log")).read_text()
    assert not (extensions / "pin_memory" / "lock").exists()
    assert [path.name for path in disk.iterdir() if path.is_dir()] == []
