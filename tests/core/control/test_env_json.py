"""What env.json says, and the secrets that it does not."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fleettune_core.envinfo import describe_environment
from fleettune_core.masking import MASK, mask, mask_value
from fleettune_core.types import DeviceKind, Devices

SECRETS = {
    "Hugging Face": "hf_AbCdEfGhIjKlMnOpQrStUv",
    "OpenAI": "sk-proj-abcdefghijklmnop1234",
    "GitHub": "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "GitHub, fine-grained": "github_pat_11ABCDEFG0abcdefghijkl_mnop",
    "GitLab": "glpat-abcdefghijklmnopqrst",
    "Slack": "xoxb-123456789012-abcdefghij",
    "AWS id": "AKIAIOSFODNN7EXAMPLE",
    "AWS secret": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "JSON web token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
    "hexadecimal": "0123456789abcdef0123456789abcdef01234567",
    "base64": "QWxhZGRpbjpvcGVuIHNlc2FtZSwgdGhlIHNlY3JldCBpcyBvdXQ0Cg==",
}
HARMLESS = (
    "/home/Ada/models/Qwen3-8B-Instruct-0001/snapshots/Checkpoint-000040",
    "lo,eth0",
    "expandable_segments:True,max_split_size_mb:128",
    "GPU-8f3c2a1b-1c2d-3e4f-5a6b-7c8d9e0f1a2b",
    "gpu[001-128],login1",
    "https://hub.example.org/models",
    "task-force-of-many-words-that-go-on-and-on",
    "smollm2-135m-sft-20260101-120000",
    "TCPStore is not available",
    "",
)


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_is_told_by_its_shape(name: str) -> None:
    secret = SECRETS[name]
    assert mask(secret) == MASK
    masked = mask(f"header: {secret} end")
    assert masked == f"header: {MASK} end"


def test_user_and_password_of_an_address_are_masked_and_the_rest_is_not() -> None:
    assert mask("http://ada:pw%20x@proxy.example.org:3128/x") == f"http://{MASK}@proxy.example.org:3128/x"
    assert mask("https://token@host") == f"https://{MASK}@host"


@pytest.mark.parametrize("text", HARMLESS)
def test_what_explains_a_run_stays_readable(text: str) -> None:
    assert mask(text) == text


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "FT_API_KEY",
        "SLURM_JWT_SECRET",
        "HF_PASSWORD",
        "hf_auth",
        "FT_CREDENTIALS",
        "WANDBAPIKEY",
        "DB_PASS",
    ],
)
def test_a_secret_is_told_by_its_name(name: str) -> None:
    assert mask_value(name, "short") == MASK


@pytest.mark.parametrize(
    "name",
    [
        "TOKENIZERS_PARALLELISM",
        "HF_HOME",
        "CUDA_VISIBLE_DEVICES",
        "OMP_PROC_BIND",
        "FT_KEYS",
        "FT_PAD_TOKEN",
        "eos_token",
    ],
)
def test_a_name_that_only_resembles_one_is_not_masked(name: str) -> None:
    assert mask_value(name, "true") == "true"


def test_only_variables_that_change_a_run_are_recorded() -> None:
    env = {
        "HF_HOME": "/data/hf",
        "NCCL_SOCKET_IFNAME": "eth0",
        "TORCH_LOGS": "dynamo",
        "RANK": "0",
        "SLURM_JOB_ID": "7",
        "HF_TOKEN": "hf_x",
        "HOME": "/home/ada",
        "MY_DIARY": "dear diary",
        "XTORCH": "1",
    }
    assert describe_environment(env)["environment"] == {
        "HF_HOME": "/data/hf",
        "HF_TOKEN": MASK,
        "NCCL_SOCKET_IFNAME": "eth0",
        "RANK": "0",
        "SLURM_JOB_ID": "7",
        "TORCH_LOGS": "dynamo",
    }


def test_versions_are_those_of_the_installed_distributions() -> None:
    versions = describe_environment({}, distributions=("pytest", "no-such-distribution"))["versions"]
    assert versions["pluggy"] == importlib.metadata.version("pluggy")
    assert versions["fleettune-core"] == importlib.metadata.version("fleettune-core")
    assert versions["pytest"] == importlib.metadata.version("pytest")
    assert "no-such-distribution" not in versions


def test_devices_and_machine_are_told_and_all_of_it_is_json() -> None:
    devices = Devices(kind=DeviceKind.CUDA, count=2, name="H200", memory_bytes=1, bf16=True, cpu_cores=4)
    told = json.loads(json.dumps(describe_environment({}, devices=devices)))
    assert {"kind": "cuda", "count": 2, "name": "H200", "bf16": True}.items() <= told["devices"].items()
    assert told["python"]["executable"] == sys.executable
    assert told["host"]


def test_the_commit_of_the_working_folder_is_told_where_there_is_one(tmp_path: Path) -> None:
    assert describe_environment({}, cwd=tmp_path)["git_commit"] is None
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    commit = describe_environment({}, cwd=tmp_path)["git_commit"]
    assert commit is not None
    assert len(commit) == 40
