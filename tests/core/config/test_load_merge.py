"""File, flags, `--set` and environment become one config: who wins, and what is remembered of the losers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleettune_core.config.load import load_config
from fleettune_core.config.source import DEFAULT, LoadedConfig, Source

REQUIRED = "model: some/model\ndata: rows.jsonl\n"


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load `run.yaml` with this text from the current folder; without text, no file."""
    monkeypatch.chdir(tmp_path)

    def call(
        text: str | None = REQUIRED,
        *,
        flags: dict[str, tuple[str, Any]] | None = None,
        sets: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        name: str = "run.yaml",
    ) -> LoadedConfig:
        if text is not None:
            Path(name).write_text(text, encoding="utf-8")
        file = None if text is None else Path(name)
        return load_config(file=file, flags=flags or {}, sets=sets, env=env or {})

    return call


def test_flags_alone_are_enough(load: Any) -> None:
    loaded = load(None, flags={"model.model": ("--model", "m"), "data.dataset": ("--dataset", "d")})
    assert (loaded.config.model.model, loaded.config.data.dataset) == ("m", "d")
    assert loaded.source("model.model") == Source(kind="flag", where="--model")


def test_what_nobody_says_is_a_default(load: Any) -> None:
    loaded = load()
    assert loaded.config.model.lora_r == 16
    assert loaded.source("model.lora_r") is DEFAULT
    assert not loaded.is_set("model.lora_r")


def test_a_flag_beats_the_file_and_the_loser_is_remembered(load: Any) -> None:
    loaded = load(REQUIRED + "train:\n  seed: 7\n", flags={"train.seed": ("--seed", "9")})
    assert loaded.config.train.seed == 9
    assert loaded.source("train.seed") == Source(kind="flag", where="--seed", beat=(("run.yaml:4", 7),))


def test_the_environment_beats_the_file_and_loses_to_a_flag(load: Any) -> None:
    text = REQUIRED + "backend: ddp\nlaunch: local\n"
    loaded = load(
        text, env={"FT_BACKEND": "fsdp", "FT_LAUNCHER": "slurm"}, flags={"launch.launcher": ("--launcher", "x")}
    )
    assert loaded.config.backend.backend == "fsdp"
    assert loaded.source("backend.backend") == Source(
        kind="environment", where="FT_BACKEND", beat=(("run.yaml:3", "ddp"),)
    )
    assert loaded.config.launch.launcher == "x"
    assert loaded.source("launch.launcher").beat == (("FT_LAUNCHER", "slurm"), ("run.yaml:4", "local"))


def test_an_empty_variable_says_nothing_and_no_other_variable_counts(load: Any) -> None:
    loaded = load(env={"FT_BACKEND": "", "FT_MODEL": "other", "FT_SEED": "3"})
    assert loaded.config.backend.backend is None
    assert loaded.config.model.model == "some/model"


def test_a_section_may_be_its_first_setting_alone(load: Any) -> None:
    loaded = load("model: a\ndata: b\nlaunch: torchrun\nbackend: ddp\nbatch: 16\ncheckpoint: 5\ntrain: sft\n")
    config = loaded.config
    assert (config.model.model, config.data.dataset, config.launch.launcher) == ("a", "b", "torchrun")
    assert (config.batch.global_batch, config.checkpoint.save_every, config.train.method) == (16, 5, "sft")


def test_an_empty_section_says_nothing(load: Any) -> None:
    assert load(REQUIRED + "train:\nbatch: {}\n").config.train.seed == 42


def test_dashes_and_underscores_are_one_letter_in_keys(load: Any) -> None:
    loaded = load(REQUIRED + "run-dir: there\ntrain: {max-steps: 3}\n", sets=("data.max-length=64",))
    assert (loaded.config.run_dir, loaded.config.train.max_steps, loaded.config.data.max_length) == ("there", 3, 64)


def test_a_json_file_is_a_run_file_also_with_tabs(load: Any) -> None:
    loaded = load('{\n\t"model": {"model": "m", "lora": true},\n\t"data": "a\\/\\ud83d\\ude00"\n}\n', name="run.json")
    assert loaded.config.model.lora is True
    assert loaded.config.data.dataset == "a/😀"
    assert loaded.source("model.lora").where == "run.json:2"


@pytest.mark.parametrize(
    ("written", "path", "value"),
    [
        ("model: {model: m, lora: true, lora_r: '32'}", "model.lora_r", 32),
        ("model: {model: m, lora: yes}", "model.lora", True),
        ("model: {model: m, lora: off}", "model.lora", False),
        ("train: {learning_rate: 1e-4}", "train.learning_rate", 1e-4),
        ("train: {learning_rate: '1e-4'}", "train.learning_rate", 1e-4),
        ("train: {warmup_steps: 0.1}", "train.warmup_steps", 0.1),
        ("train: {max_steps: 2.0}", "train.max_steps", 2),
        ("train: {max_steps: 1_000}", "train.max_steps", 1000),
        ("train: {max_steps: 012}", "train.max_steps", 12),
        ("train: {epochs: 3}", "train.epochs", 3.0),
        ("launch: {nodes: 2}", "launch.nodes", "2"),
        ("launch: {nodes: 1:4}", "launch.nodes", "1:4"),
        ("model: {model: m, revision: 123e4567}", "model.revision", "123e4567"),
        ("name: 2024-01-01", "name", "2024-01-01"),
        ("data: {dataset: d, format: text}", "data.format", "text"),
    ],
)
def test_values_of_the_file_become_their_settings_type(load: Any, written: str, path: str, value: Any) -> None:
    text = (
        written
        + "\n"
        + "".join(line + "\n" for line in REQUIRED.splitlines() if line.partition(":")[0] != written.partition(":")[0])
    )
    found = _value(load(text), path)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("flag", "path", "typed", "value"),
    [
        ("--lora-r", "model.lora_r", "8", 8),
        ("--learning-rate", "train.learning_rate", "2e-5", 2e-5),
        ("--nodes", "launch.nodes", "1:4", "1:4"),
        ("--lora", "model.lora", True, True),
        ("--revision", "model.revision", "true", "true"),
    ],
)
def test_text_of_flags_becomes_its_settings_type(load: Any, flag: str, path: str, typed: Any, value: Any) -> None:
    flags = {"model.lora": ("--lora", True), path: (flag, typed)}
    found = _value(load(flags=flags), path)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("model.model=some: odd #name", "model.model", "some: odd #name"),
        ("model.model='quoted'", "model.model", "quoted"),
        ("model.model=[x", "model.model", "[x"),
        ("model=bare", "model.model", "bare"),
        ("name=0123", "name", "0123"),
        ("train.seed=5", "train.seed", 5),
        ("train.max_steps=null", "train.max_steps", None),
        ("train.adam_beta1=0.5", "train.extra.adam_beta1", 0.5),
        ("train.lr_scheduler_kwargs={num_cycles: 2}", "train.extra.lr_scheduler_kwargs", {"num_cycles": 2}),
        ("train.optim_target_modules=[a, b]", "train.extra.optim_target_modules", ["a", "b"]),
    ],
)
def test_set_takes_yaml_and_needs_no_quotes(load: Any, text: str, path: str, value: Any) -> None:
    assert _value(load(sets=(text,)), path) == value


def test_set_counts_as_a_flag(load: Any) -> None:
    loaded = load(REQUIRED + "train: {seed: 1}\n", sets=("train.seed=2",))
    assert loaded.source("train.seed") == Source(kind="flag", where="--set train.seed", beat=(("run.yaml:3", 1),))


def test_null_takes_a_value_of_the_file_back(load: Any) -> None:
    loaded = load(REQUIRED + "train: {max_steps: 40}\n", sets=("train.max_steps=null",))
    assert loaded.config.train.max_steps is None
    assert not loaded.is_set("train.max_steps")


def test_a_flag_and_a_set_that_agree_are_no_mistake(load: Any) -> None:
    loaded = load(flags={"train.seed": ("--seed", "5")}, sets=("train.seed=5",))
    assert loaded.source("train.seed") == Source(kind="flag", where="--seed")


def test_other_keys_of_launch_and_backend_are_left_to_their_plugins(load: Any) -> None:
    text = REQUIRED + "launch:\n  partition: gpu\n  nodes: 2\nbackend: {bucket_mb: 10}\n"
    loaded = load(text, flags={"backend.grad_compression": ("--grad-compression", "bf16")})
    assert dict(loaded.config.launcher_options) == {"partition": "gpu"}
    assert dict(loaded.config.backend_options) == {"bucket_mb": 10, "grad_compression": "bf16"}
    assert loaded.source("launch.partition") == Source(kind="file", where="run.yaml:4")
    assert loaded.source("backend.grad_compression").where == "--grad-compression"


def test_a_field_of_trl_goes_through_with_its_type(load: Any) -> None:
    loaded = load(
        REQUIRED + "train: {adam_beta1: '0.8', neftune_noise_alpha: 5, group: null}\n".replace(", group: null", "")
    )
    assert dict(loaded.config.train.extra) == {"adam_beta1": 0.8, "neftune_noise_alpha": 5.0}


def test_anchors_and_merges_are_followed(load: Any) -> None:
    text = "train: &base {seed: 3, max_steps: 5}\nmodel: m\ndata: d\n"
    assert load(text).config.train.seed == 3
    nested = "model: m\ndata: d\ntrain:\n  <<: {seed: 3, max_steps: 5}\n  seed: 4\n"
    config = load(nested).config
    assert (config.train.seed, config.train.max_steps) == (4, 5)


def test_the_secret_that_lost_is_not_remembered(load: Any) -> None:
    loaded = load(REQUIRED + "launch: {api_token: abc}\n", sets=("launch.api_token=def",))
    assert loaded.source("launch.api_token").beat == (("run.yaml:3", "***"),)


def test_what_is_required_can_be_narrowed(tmp_path: Path) -> None:
    loaded = load_config(file=None, flags={"data.dataset": ("DATA", "d")}, sets=(), env={}, required=("data.dataset",))
    assert loaded.config.model.model is None


def _value(loaded: LoadedConfig, path: str) -> Any:
    value: Any = loaded.config
    for name in path.split("."):
        value = value[name] if isinstance(value, (dict,)) or hasattr(value, "keys") else getattr(value, name)
    return value


@pytest.mark.parametrize("targets", ["[q_proj, v_proj]", "\n    - q_proj\n    - v_proj", "q_proj,v_proj"])
def test_adapter_targets_may_be_a_list_or_names_with_commas(load: Any, targets: str) -> None:
    loaded = load(f"model:\n  model: m\n  lora: true\n  lora_target: {targets}\ndata: d\n")
    assert loaded.config.model.lora_target == "q_proj,v_proj"
    if "\n" not in targets:
        typed = load(sets=("model.lora=true", f"model.lora_target={targets}"))
        assert typed.config.model.lora_target == "q_proj,v_proj"
