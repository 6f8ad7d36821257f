"""One loss curve, whatever the layout: full fine-tuning and LoRA, fp32, the same global batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from train_runs import Training, loss_distance, train, weight_distance

STEPS = 10
LAYOUTS = {
    "1 process, 8 rows at once": ["--nproc-per-node", "1", "--micro-batch", "8"],
    "1 process, 2 rows at a time": ["--nproc-per-node", "1", "--micro-batch", "2"],
    "2 processes, 4 rows at once": ["--nproc-per-node", "2", "--micro-batch", "4"],
    "2 processes, 1 row at a time": ["--nproc-per-node", "2", "--micro-batch", "1"],
}
REFERENCE = "1 process, 8 rows at once"
OTHERS = [name for name in LAYOUTS if name != REFERENCE]
KINDS = {"full": [], "lora": ["--lora", "--lora-r", "8"]}


@pytest.fixture(scope="module", params=list(KINDS))
def trainings(request, tiny_model, tiny_rows, tmp_path_factory) -> dict[str, Training]:
    folder = tmp_path_factory.mktemp("same-numbers")
    # 64 rows less a fifth are 51: an epoch's last global batch is short, and ten steps go beyond it.
    common = [
        *("--model", str(tiny_model), "--dataset", str(tiny_rows), "--global-batch", "8", "--precision", "fp32"),
        *("--max-steps", str(STEPS), "--learning-rate", "1e-3", "--eval-split", "0.2", "--eval-steps", "5"),
        *("--save-every", "6", *KINDS[request.param]),
    ]
    cache = {"FT_CACHE_DIR": str(folder / "cache")}
    runs = {
        name: train(folder / str(number), *common, *layout, environment=cache)
        for number, (name, layout) in enumerate(LAYOUTS.items())
    }
    for name, run in runs.items():
        assert run.exit_code == 0, f"{name}:\n{run.stderr}"
    return runs


@pytest.mark.parametrize("layout", OTHERS)
def test_losses_agree_step_by_step(trainings, layout):
    assert len(trainings[layout].losses) == STEPS
    assert loss_distance(trainings[REFERENCE], trainings[layout]) < 1e-5


@pytest.mark.parametrize("layout", OTHERS)
def test_saved_weights_agree(trainings, layout):
    assert weight_distance(trainings[REFERENCE], trainings[layout]) < 1e-6


@pytest.mark.parametrize("layout", OTHERS)
def test_gradient_norms_rows_and_tokens_agree(trainings, layout):
    for ours, reference in zip(trainings[layout].steps, trainings[REFERENCE].steps, strict=True):
        assert ours["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4)
        for name in ("step", "epoch", "samples", "tokens", "learning_rate"):
            assert ours[name] == pytest.approx(reference[name]), name


@pytest.mark.parametrize("layout", OTHERS)
def test_evaluation_losses_agree(trainings, layout):
    def evaluations(run: Training) -> list[tuple[int, float]]:
        return [(line["step"], line["eval_loss"]) for line in run.metrics if "eval_loss" in line]

    ours, reference = evaluations(trainings[layout]), evaluations(trainings[REFERENCE])
    assert [step for step, _ in ours] == [5, 10]
    assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in reference], rel=1e-5)


def test_training_learns(trainings):
    losses = trainings[REFERENCE].losses
    assert losses[-1] < losses[0] - 0.02


def test_every_row_of_an_epoch_is_seen_once(trainings):
    samples = [line["samples"] for line in trainings[REFERENCE].steps]
    assert samples[:7] == [8, 8, 8, 8, 8, 8, 3]


def test_the_report_tells_the_world_that_formed(trainings):
    alone, together = trainings[REFERENCE].report, trainings["2 processes, 4 rows at once"].report
    assert alone["status"] == together["status"] == "done"
    assert [rank["wrapper"] for rank in together["world"]] == ["DistributedDataParallel"] * 2
    assert len(alone["world"]) == 1
    assert together["totals"]["steps"] == STEPS


def test_the_result_and_a_checkpoint_load_where_fleettune_cannot_be_imported(trainings, tiny_model):
    run = trainings["2 processes, 4 rows at once"]
    code = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0].startswith("fleettune"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
try:
    import fleettune_core
except ModuleNotFoundError:
    pass
else:
    sys.exit("fleettune_core could be imported")
import torch
from pathlib import Path
from transformers import AutoTokenizer, AutoModelForCausalLM
for folder in sys.argv[1:]:
    if (Path(folder) / "adapter_config.json").exists():
        from peft import AutoPeftModelForCausalLM
        model = AutoPeftModelForCausalLM.from_pretrained(folder)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer("what is two", return_tensors="pt")
    assert torch.isfinite(model(**tokens).logits).all()
assert not [name for name in sys.modules if name.startswith("fleettune")]
"""
    folders = [run.folder / "model", run.folder / "checkpoints" / "step-000006" / "model"]
    done = subprocess.run([sys.executable, "-c", code, *map(str, folders)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_checkpoint_is_whole_and_says_where_it_stands(trainings):
    import json

    from fleettune_core.training.checkpoints import broken_files

    folder = trainings["2 processes, 4 rows at once"].folder / "checkpoints" / "step-000006"
    assert broken_files(folder) == []
    position = json.loads((folder / "position.json").read_text())
    assert position["step"] == 6
    assert sorted(path.name for path in (folder / "rng").iterdir()) == ["rank0.pt", "rank1.pt"]
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".")]


def test_a_step_that_saved_is_timed_like_the_others(trainings):
    for run in trainings.values():
        seconds = sorted(line["step_seconds"] for line in run.steps)
        assert run.steps[5]["step_seconds"] > seconds[len(seconds) // 2] / 20


GEMMA = ["--precision", "fp32", "--learning-rate", "1e-3"]
VARIANTS = {
    "alone": [*GEMMA, "--nproc-per-node", "1", "--micro-batch", "8"],
    "together": [*GEMMA, "--nproc-per-node", "2", "--micro-batch", "2"],
    "recomputing": [*GEMMA, "--nproc-per-node", "1", "--micro-batch", "8", "--gradient-checkpointing"],
    "bf16": ["--precision", "bf16", "--nproc-per-node", "2", "--micro-batch", "4"],
    "fp32": ["--precision", "fp32", "--nproc-per-node", "1", "--micro-batch", "8"],
}


@pytest.fixture(scope="module")
def tiny_gemma(tiny_model, tmp_path_factory) -> Path:
    """A model that caps its logits: the loss is TRL's own then, over all positions."""
    import torch
    from transformers import AutoTokenizer, Gemma2Config, Gemma2ForCausalLM

    folder = tmp_path_factory.mktemp("tiny-gemma")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    tokens = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = Gemma2ForCausalLM(Gemma2Config(vocab_size=len(tokenizer), **sizes, **heads, **tokens))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def variants(tiny_model, tiny_gemma, tiny_rows, tmp_path_factory) -> dict[str, Training]:
    folder = tmp_path_factory.mktemp("variants")
    common = ["--dataset", str(tiny_rows), "--global-batch", "8", "--max-steps", "4"]
    cache = {"FT_CACHE_DIR": str(folder / "cache")}
    runs = {
        name: train(
            folder / name,
            *common,
            *("--model", str(tiny_gemma if variant[: len(GEMMA)] == GEMMA else tiny_model)),
            *variant,
            environment=cache,
        )
        for name, variant in VARIANTS.items()
    }
    for name, run in runs.items():
        assert run.exit_code == 0, f"{name}:\n{run.stderr}"
    return runs


@pytest.mark.parametrize("name", ["together", "recomputing"])
def test_the_loss_of_the_whole_logits_agrees_too(variants, name):
    assert loss_distance(variants["alone"], variants[name]) < 1e-5
    assert weight_distance(variants["alone"], variants[name]) < 1e-6


def test_bf16_on_two_ranks_stays_near_fp32(variants):
    assert 0 < loss_distance(variants["fp32"], variants["bf16"]) < 0.02
