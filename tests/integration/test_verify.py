"""`ft verify` as a user types it: what agrees, what does not, and what failed."""

from __future__ import annotations

import json

import pytest

from train_runs import ft
from wrong_backend_sources import SOURCE, UNCHECKED, install


@pytest.fixture(scope="module")
def verify(tiny_model, tiny_rows, tmp_path_factory):
    """A function that runs `ft verify` with these words; returns the process and what it wrote into its folder."""
    base = tmp_path_factory.mktemp("verify")
    for name, source in (("checked", SOURCE), ("unchecked", SOURCE + UNCHECKED)):
        install(base / name, source)

    def run(name: str, *words: str, site: str = "unchecked"):
        data = ["--model", str(tiny_model), "--dataset", str(tiny_rows), "--global-batch", "8", "--steps", "3"]
        environment = {"PYTHONPATH": str(base / site), "FT_CACHE_DIR": str(base / "cache")}
        done = ft("verify", *data, "--run-dir", str(base / name), *words, environment=environment)
        return done, base / name

    return run


@pytest.fixture(scope="module")
def compared(verify):
    return verify("compared", "--layouts", "1x1,2x2", "--backends", "ddp,losing", "--learning-rate", "1e-3")


def test_a_backend_that_loses_gradients_disagrees_with_exit_code_1(compared):
    done, _ = compared
    assert done.returncode == 1, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[:5]]
    assert rows[0] == ["backend", "layout", "loss", "norm", "weights", "held", "peak", "time", "verdict"]
    verdicts = {(row[0], row[1]): row[-1] for row in rows[1:]}
    # With one micro-batch per step there is nothing to lose.
    assert verdicts == {
        ("ddp", "1x1"): "reference",
        ("losing", "1x1"): "same",
        ("ddp", "2x2"): "same",
        ("losing", "2x2"): "differs",
    }
    assert "losing 2x2: the loss of step " in done.stdout
    assert done.stdout.splitlines()[-1] == "1 of 4 disagree: losing 2x2"
    assert "4/4 losing 2x2: differs" in done.stderr


def test_the_result_lies_beside_ordinary_run_folders_without_their_models(compared):
    _, folder = compared
    result = json.loads((folder / "verify.json").read_text())
    assert result["agree"] is False
    assert [item["verdict"] for item in result["runs"]] == ["reference", "same", "same", "differs"]
    right, wrong = result["runs"][2:]
    assert right["loss_distance"] < 1e-5 < wrong["loss_distance"]
    assert right["weight_distance"]["rms"] < 1e-6 < wrong["weight_distance"]["rms"]
    assert len({item["initial_weights"] for item in result["runs"]}) == 1
    assert all(len(item["losses"]) == 3 for item in result["runs"])
    for name in ("ddp-1x1", "losing-2x2"):
        assert (folder / name / "report.json").is_file()
        assert not (folder / name / "model").exists()


@pytest.mark.slow
def test_backends_that_agree_end_with_exit_code_0_and_print_json(verify):
    words = ["--layouts", "1x1,2x1,1x2", "--backends", "ddp,deepspeed:3,fsdp", "--json", "--keep-models", "--quiet"]
    done, folder = verify("agree", *words)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["agree"] is True
    assert len(result["runs"]) == 9
    assert done.stderr == ""
    assert (folder / "fsdp-2x1" / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_run_that_its_own_check_stopped_is_a_failure_that_says_why(verify):
    done, _ = verify("stopped", "--layouts", "2x1", "--backends", "ddp,summing", site="checked")
    assert done.returncode == 1
    assert "rank 0: it is the sum over 2 ranks" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 of 2 disagree: summing 2x1"


def test_a_dry_run_starts_nothing(verify):
    done, folder = verify("dry", "--layouts", "1x1,2x1", "--backends", "ddp", "--dry-run")
    assert done.returncode == 0
    assert not folder.exists()
    assert "8 rows = 4 per micro-batch × 1 accumulation × 2 ranks" in done.stdout
