"""What was asked is what ran, and the numbers agree: every backend gives ddp's losses, weights and optimizer state."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from train_runs import ASPECTS, Training, disagreements, loss_distance, train, weight_distance

STEPS = 5
KINDS = {"full": [], "lora": ["--lora", "--lora-r", "8"]}
BACKENDS = {
    "zero-0": (["--backend", "deepspeed", "--zero-stage", "0"], "DeepSpeedEngine", "none"),
    "zero-1": (["--backend", "deepspeed", "--zero-stage", "1"], "DeepSpeedEngine", "zero-1"),
    "zero-2": (["--backend", "deepspeed", "--zero-stage", "2"], "DeepSpeedEngine", "zero-2"),
    "zero-3": (["--backend", "deepspeed", "--zero-stage", "3"], "DeepSpeedEngine", "zero-3"),
    "fsdp": (["--backend", "fsdp"], "FSDP", "fsdp"),
}
LAYOUTS = {
    "alone": ["--nproc-per-node", "1", "--micro-batch", "4"],
    "together": ["--nproc-per-node", "2", "--micro-batch", "4"],
    "split": ["--nproc-per-node", "2", "--micro-batch", "2"],
}
QUICK = {("full", "zero-3", "split"), ("lora", "fsdp", "split")}
CASES = [
    pytest.param(kind, backend, layout, marks=[] if (kind, backend, layout) in QUICK else [pytest.mark.slow])
    for kind in KINDS
    for backend in BACKENDS
    for layout in LAYOUTS
]


@pytest.fixture(scope="module")
def runs(tiny_model, tiny_rows, tmp_path_factory):
    """A function that gives the training of a kind, a backend and a layout; each is run once."""
    folder = tmp_path_factory.mktemp("backends")
    common = [
        *("--model", str(tiny_model), "--dataset", str(tiny_rows), "--global-batch", "8", "--precision", "fp32"),
        *("--max-steps", str(STEPS), "--learning-rate", "1e-3", "--eval-split", "0.2", "--save-every", "4"),
    ]
    made: dict[str, Training] = {}

    def run(kind: str, backend: str = "ddp", layout: str = "alone", *more: str) -> Training:
        name = "-".join([kind, backend, layout, *more]).replace("/", "")
        if name not in made:
            chosen = BACKENDS[backend][0] if backend in BACKENDS else ["--backend", backend]
            words = [*common, *KINDS[kind], *chosen, *LAYOUTS[layout], *more]
            made[name] = train(folder / name, *words, environment={"FT_CACHE_DIR": str(folder / "cache")})
            assert made[name].exit_code == 0, f"{name}:\n{made[name].stderr}"
        return made[name]

    return run


def optimizer_state(run: Training) -> dict[str, object]:
    """The checkpoint's optimizer state by parameter name, whatever wrote it."""
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    return _load_state_dict_from_keys(checkpoint_id=run.folder / "checkpoints" / "step-000004" / "optimizer")[
        "optimizer"
    ]


@pytest.mark.parametrize(("kind", "backend", "layout"), CASES)
class TestSameNumbers:
    """Against ddp on one process."""

    @pytest.mark.parametrize("aspect", ASPECTS)
    def test_it_agrees(self, runs, kind, backend, layout, aspect):
        _, wrapper, sharding = BACKENDS[backend]
        ours = runs(kind, backend, layout)
        assert len(ours.losses) == STEPS
        ranks = 1 if layout == "alone" else 2
        differing = disagreements(runs(kind), ours, wrapper=wrapper, sharding=sharding, ranks=ranks)
        assert aspect not in differing

    def test_a_gradient_norm_can_not_pass_for_another_steps(self, runs, kind, backend, layout):
        assert len({round(line["grad_norm"], 3) for line in runs(kind).steps}) == STEPS

    def test_the_run_itself_has_checked_what_it_trained_with(self, runs, kind, backend, layout):
        world, reference = runs(kind, backend, layout).report["world"], runs(kind).report["world"][0]
        for member in world:
            assert member["initial_weights"] == reference["initial_weights"]
            assert member["trainable_parameters"] == reference["trainable_parameters"]
            assert member["gradient_distance"] < 1e-5

    def test_evaluation_agrees(self, runs, kind, backend, layout):
        ours, reference = (
            [line["eval_loss"] for line in run.metrics if "eval_loss" in line]
            for run in (
                runs(kind, backend, layout),
                runs(kind),
            )
        )
        assert ours == pytest.approx(reference, rel=1e-5)

    def test_optimizer_state_is_written_in_one_form(self, runs, kind, backend, layout):
        ours, reference = optimizer_state(runs(kind, backend, layout)), optimizer_state(runs(kind))
        assert ours.keys() == reference.keys()
        for name, value in reference.items():
            if hasattr(value, "shape"):
                assert ours[name].shape == value.shape, name
                assert math.isclose(float((ours[name] - value).abs().max()), 0, abs_tol=1e-6), name


VARIANTS = {
    "hybrid": ("fsdp", "--nproc-per-node", "4", "--micro-batch", "1", "--shard-group", "2"),
    "recomputing": ("fsdp", "--gradient-checkpointing"),
    "offloading": ("zero-3", "--offload-optimizer", "cpu", "--offload-params", "cpu"),
    "offloading-2": ("zero-2", "--offload-optimizer", "cpu"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(VARIANTS))
def test_variants_agree_too(runs, name):
    backend, *more = VARIANTS[name]
    ours = runs("full", backend, "split", *more)
    assert loss_distance(runs("full"), ours) < 1e-5
    assert weight_distance(runs("full"), ours) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fsdp", "zero-2", "zero-3"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_bf16_stays_near_fp32(runs, tiny_model, kind, backend):
    ours = runs(kind, backend, "together", "--precision", "bf16")
    assert 0 < loss_distance(runs(kind), ours) < 0.02


def test_a_sharded_result_is_an_ordinary_folder(runs):
    from transformers import AutoModelForCausalLM

    run = runs("full", "zero-3", "split")
    for folder in (run.folder / "model", Path(run.folder) / "checkpoints" / "step-000004" / "model"):
        assert type(AutoModelForCausalLM.from_pretrained(folder)).__name__ == "LlamaForCausalLM"


DIVIDED = {
    "zero-1": ("optimizer_bytes",),
    "zero-2": ("optimizer_bytes",),
    "zero-3": ("optimizer_bytes", "weight_bytes"),
    "fsdp": ("optimizer_bytes", "weight_bytes"),
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", list(DIVIDED))
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_holds_its_share_and_no_more(runs, backend, ranks, tmp_path_factory):
    (whole,) = runs("full").report["world"]
    more = ["--nproc-per-node", str(ranks)]
    if backend == "zero-3":
        # Small weights stay whole on every rank, and those of the tiny model are all small.
        config = tmp_path_factory.mktemp("config") / "all.json"
        config.write_text('{"zero_optimization": {"stage3_param_persistence_threshold": 0}}')
        more += ["--deepspeed-config", str(config)]
    world = runs("full", backend, "split", *more).report["world"]
    assert len(world) == ranks
    for name in DIVIDED[backend]:
        for member in world:
            assert member[name] == pytest.approx(whole[name] / ranks, rel=0.1), name


def test_a_rank_that_dies_in_a_step_ends_the_others_and_is_named(tiny_model, tiny_rows, tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "fleettune_cli", "train", "--run-dir", str(folder), "--model", str(tiny_model)]
    command += ["--dataset", str(tiny_rows), "--global-batch", "8", "--precision", "fp32", "--max-steps", "1000000"]
    command += ["--backend", "deepspeed", "--zero-stage", "3", "--nproc-per-node", "2"]
    environment = {**os.environ, "NO_COLOR": "1", "FT_CACHE_DIR": str(tmp_path / "cache")}
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        deadline = time.monotonic() + 120
        while not (folder / "metrics.jsonl").is_file() or not (folder / "metrics.jsonl").stat().st_size:
            assert process.poll() is None, (tmp_path / "output").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        os.kill(json.loads((folder / "ranks" / "rank1.json").read_text())["pid"], signal.SIGKILL)
        assert process.wait(30) == 1
    report = json.loads((folder / "report.json").read_text())
    assert report["first_failure"]["rank"] == 1
    assert "SIGKILL" in report["first_failure"]["cause"]
