"""Every mistake of a run file and the command line is told at once: where, what, and what to type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleettune_core.config.known import settings_by_path
from fleettune_core.config.load import load_config, read_config
from fleettune_core.config.trl_fields import LIMITS, OWNED, fields_for
from fleettune_core.errors import ExitCode, FtError

REQUIRED = "model: some/model\ndata: rows.jsonl\n"
SCHEDULES = fields_for("sft")["lr_scheduler_type"].choices
MANY = """\
model:
  model: some/model
  lora-r: sixteen
  lora_rank: 3
data: {dataset: rows.jsonl, format: jsonn}
train:
  output_dir: x
  adam_bta2: 3
  seed: true
  max_steps: 0
  lr_scheduler_type: cosin
learning_rate: 3
modell: x
checkpoint: [1]
"""


def problems_of(text: str | None, *, code: ExitCode, **given: Any) -> list[str]:
    if text is not None:
        Path("run.yaml").write_text(text, encoding="utf-8")
    file = None if text is None else Path("run.yaml")
    with pytest.raises(FtError) as caught:
        load_config(file=file, **{"flags": {}, "sets": (), "env": {}, **given})
    assert caught.value.exit_code is code
    return list(caught.value.problems)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_all_mistakes_of_a_file_are_told_at_once_in_its_order() -> None:
    assert problems_of(MANY, code=ExitCode.CONFIG) == [
        "run.yaml:3: model.lora_r: 'sixteen' is not a whole number",
        "run.yaml:4: model.lora_rank: unknown key (did you mean lora_r?)",
        "run.yaml:5: data.format: 'jsonn' is not one of messages, prompt-completion, text, alpaca",
        "run.yaml:7: train.output_dir: may not be set here; use --run-dir DIR",
        "run.yaml:8: train.adam_bta2: unknown key (did you mean adam_beta2?)",
        "run.yaml:9: train.seed: 'true' is not a whole number",
        "run.yaml:10: train.max_steps: '0' must be at least 1",
        f"run.yaml:11: train.lr_scheduler_type: 'cosin' is not one of {', '.join(SCHEDULES)} (did you mean cosine?)",
        "run.yaml:12: learning_rate: unknown key; learning_rate belongs under train:",
        "run.yaml:13: modell: unknown key (did you mean model?)",
        "run.yaml:14: checkpoint: a section is a mapping, not a list",
    ]


def test_a_mistake_of_the_command_line_alone_is_exit_2() -> None:
    flags = {"model.lora_r": ("--lora-r", "sixteen"), "train.seed": ("--seed", "-1")}
    assert problems_of(REQUIRED, code=ExitCode.USAGE, flags=flags) == [
        "--lora-r: 'sixteen' is not a whole number",
        "--seed: '-1' must be at least 0",
    ]


def test_mistakes_of_both_are_exit_5_and_the_file_comes_first() -> None:
    problems = problems_of(
        REQUIRED + "train: {seed: x}\n", code=ExitCode.CONFIG, flags={"data.max_length": ("--max-length", "long")}
    )
    assert problems == [
        "run.yaml:3: train.seed: 'x' is not a whole number",
        "--max-length: 'long' is not a whole number",
    ]


def test_missing_model_and_data_say_what_to_type() -> None:
    assert problems_of(None, code=ExitCode.USAGE) == [
        "no model given: --model MODEL, or `model: ...` in run.yaml",
        "no dataset given: --dataset DATA, or `data: ...` in run.yaml",
    ]
    assert problems_of("train: {seed: 1}\n", code=ExitCode.CONFIG)[0].startswith("no model given: --model MODEL")


def test_a_wrong_value_is_not_missing_as_well() -> None:
    assert problems_of("model: [a]\ndata: {dataset: [b]}\n", code=ExitCode.CONFIG) == [
        "run.yaml:1: model: a section is a mapping, not a list",
        "run.yaml:2: data.dataset: ['b'] is not text (put it in quotes)",
    ]


def test_a_misspelt_model_or_dataset_is_not_missing_as_well() -> None:
    assert problems_of("modell: m\ndata: {datset: d}\n", code=ExitCode.CONFIG) == [
        "run.yaml:1: modell: unknown key (did you mean model?)",
        "run.yaml:2: data.datset: unknown key (did you mean dataset?)",
    ]


def test_kept_mistakes_stand_beside_a_config_of_the_right_values() -> None:
    Path("run.yaml").write_text("model: m\ndata: d\ntrain: {sed: 1, max_steps: x, epochs: 2}\n", encoding="utf-8")
    loaded = read_config(file=Path("run.yaml"), flags={}, sets=(), env={})
    assert [mistake.text for mistake in loaded.mistakes] == [
        "run.yaml:3: train.sed: unknown key (did you mean seed?)",
        "run.yaml:3: train.max_steps: 'x' is not a whole number",
    ]
    assert loaded.wrong == {"train.sed", "train.seed", "train.max_steps"}
    assert (loaded.config.train.epochs, loaded.config.train.max_steps, loaded.config.model.model) == (2.0, None, "m")
    assert not loaded.is_set("train.max_steps")


@pytest.mark.parametrize(
    "path", ["name", "run_dir", "model.model", "data.dataset", "data.eval_dataset", "launch.nodes"]
)
def test_empty_text_says_nothing_and_is_refused(path: str) -> None:
    flag = "--" + path.rpartition(".")[2].replace("_", "-")
    problems = problems_of(REQUIRED, code=ExitCode.USAGE, flags={path: (flag, "")})
    assert problems == [f"{flag}: is empty; leave it out, or set the variable that it was to come from"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("train.seed=4294967296", "--set train.seed: '4294967296' must be at most 4294967295"),
        ("train.adam_beta1=7", "--set train.adam_beta1: '7' must be below 1"),
        ("train.adam_beta2=-0.1", "--set train.adam_beta2: '-0.1' must be at least 0"),
        ("train.adam_epsilon=0", "--set train.adam_epsilon: '0' must be above 0"),
        ("train.dataloader_num_workers=-4", "--set train.dataloader_num_workers: '-4' must be at least 0"),
        ("train.dataloader_prefetch_factor=0", "--set train.dataloader_prefetch_factor: '0' must be at least 1"),
        ("train.neftune_noise_alpha=-1", "--set train.neftune_noise_alpha: '-1' must be at least 0"),
    ],
)
def test_a_number_that_cannot_work_is_refused(text: str, problem: str) -> None:
    assert problems_of(REQUIRED, code=ExitCode.USAGE, sets=(text,)) == [problem]


def test_every_limit_is_that_of_a_field_that_may_be_set() -> None:
    assert set(LIMITS) <= fields_for("sft").keys() - OWNED.keys() - {
        path.partition(".")[2] for path in settings_by_path()
    }


def test_an_attention_kernel_is_a_known_one_or_a_hub_id() -> None:
    flags = {"model.attn_implementation": ("--attn-implementation", "spda")}
    (problem,) = problems_of(REQUIRED, code=ExitCode.USAGE, flags=flags)
    assert problem == (
        "--attn-implementation: 'spda' is not one of eager, sdpa, flash_attention_2, flash_attention_3,"
        " flash_attention_4, flex_attention, nor a hub id (did you mean sdpa?)"
    )
    for name in ("eager", "kernels-community/flash-attn2"):
        given = {"model.attn_implementation": ("--attn-implementation", name)}
        loaded = load_config(file=Path("run.yaml"), flags=given, sets=(), env={})
        assert loaded.config.model.attn_implementation == name


@pytest.mark.parametrize("text", ["[q_proj, 3]", "[]", "[[q_proj]]"])
def test_a_list_of_adapter_targets_holds_names(text: str) -> None:
    (problem,) = problems_of(f"model: {{model: m, lora: true, lora_target: {text}}}\ndata: d\n", code=ExitCode.CONFIG)
    assert problem.endswith("is not a list of names, such as [q_proj, v_proj]")


def test_a_flag_and_a_set_that_disagree_are_named_both() -> None:
    problems = problems_of(REQUIRED, code=ExitCode.USAGE, flags={"train.seed": ("--seed", "7")}, sets=("train.seed=8",))
    assert problems == ["--seed: '7', but --set train.seed says 8; give one of them"]


@pytest.mark.parametrize("text", ["foo", "=3", "train.=3", "train..seed=3"])
def test_a_set_of_another_form_is_shown_an_example(text: str) -> None:
    (problem,) = problems_of(REQUIRED, code=ExitCode.USAGE, sets=(text,))
    assert problem == (
        f"--set {text}: not of the form key.path=value;"
        " write --set key.path=value, for instance --set train.adam_beta1=0.8"
    )


def test_a_set_with_broken_yaml_is_shown_an_example() -> None:
    (problem,) = problems_of(REQUIRED, code=ExitCode.USAGE, sets=("train.adam_beta1=[1",))
    assert problem.startswith("--set train.adam_beta1: '[1': while parsing a flow sequence")
    assert problem.endswith("for instance --set train.adam_beta1=0.8")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("seed=3", "--set seed: unknown key; seed belongs under train:"),
        ("sed.x=3", "--set sed.x: unknown section; valid are launch, backend, model, data, train, batch, checkpoint"),
        ("trian.seed=3", "--set trian.seed: unknown section (did you mean train?)"),
        ("frobnicate=3", "--set frobnicate: unknown key; valid are name, run_dir, launch, backend, model, data,"),
        ("train.lora=1", "--set train.lora: unknown key; lora belongs under model:"),
        ("data.max_seq_len=1", "--set data.max_seq_len: unknown key (did you mean max_length?)"),
        ("data.max_seq_length=1", "--set data.max_seq_length: unknown key; max_length belongs under data:"),
        ("train.lr_scheduler_kwargs.a=1", "--set train.lr_scheduler_kwargs.a: a path has two parts; write train.lr_"),
        ("adam_beta1=1", "--set adam_beta1: unknown key; adam_beta1 belongs under train:"),
        ("output_dir=x", "--set output_dir: unknown key; it is called run_dir, beside the sections"),
        ("train.packing=true", "--set train.packing: may not be set here; packing is not in this version"),
    ],
)
def test_an_unknown_key_is_sent_where_it_belongs(text: str, problem: str) -> None:
    (found,) = problems_of(REQUIRED, code=ExitCode.USAGE, sets=(text,))
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("train: {learning_rate: .inf}", "'.inf' is not a finite number"),
        ("train: {learning_rate: true}", "'true' is not a number"),
        ("train: {learning_rate: 0}", "'0' must be above 0"),
        ("train: {max_steps: 2.5}", "'2.5' is not a whole number"),
        ("train: {seed: }", "has no value"),
        ("train: {adam_beta1: [1]}", "[1] is not a number"),
        ("train: {lr_scheduler_kwargs: 3}", "'3' is not text (put it in quotes) or a mapping"),
        ("train: {optim: adam_w}", "'adam_w' is not a known name (did you mean "),
        ("train: {gradient_checkpointing: maybe}", "'maybe' is not true or false"),
        ("name: true", "'true' is not text (put it in quotes)"),
    ],
)
def test_a_value_of_another_kind_is_refused(line: str, problem: str) -> None:
    (found,) = problems_of(REQUIRED + line + "\n", code=ExitCode.CONFIG)
    assert problem in found
    assert found.startswith("run.yaml:3: ")


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        ("model: a\n b: c\n", "run.yaml:2:3", "mapping values are not allowed here"),
        ("model: [a\n", "run.yaml:2:1", "expected ',' or ']'"),
        ("model: a\nmodel: b\n", "run.yaml:2:1", "model is given twice; the first time on line 1"),
        ("model: !!python/object:os.system x\n", "run.yaml:1:8", "the tag !!python/object:os.system is not allowed"),
        ("model: !thing x\n", "run.yaml:1:8", "the tag !thing is not allowed"),
        ("train: &a\n  x: *a\n", "run.yaml:1:8", "this value contains itself"),
        ("model: *a\n", "run.yaml:1:8", "found undefined alias 'a'"),
        ("model: a\n---\nmodel: b\n", "run.yaml:2:1", "another document"),
        ("model: a\n\tb: c\n", "run.yaml:2:1", "cannot start any token"),
        ("model: a\x07b\n", "run.yaml:1:9", "special characters are not allowed"),
    ],
)
def test_a_broken_file_is_told_with_its_place(text: str, place: str, said: str) -> None:
    Path("run.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(FtError) as caught:
        load_config(file=Path("run.yaml"), flags={}, sets=(), env={})
    assert caught.value.exit_code is ExitCode.CONFIG
    assert caught.value.message.startswith(f"{place}: ")
    assert said in caught.value.message


@pytest.mark.parametrize("text", ["just words\n", "- a\n- b\n"])
def test_a_file_that_is_no_mapping_is_told_so(text: str) -> None:
    Path("run.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(FtError, match=r"run\.yaml:1: a run file is a mapping of sections"):
        load_config(file=Path("run.yaml"), flags={}, sets=(), env={})


def test_two_spellings_of_one_key_are_one_key_given_twice() -> None:
    problems = problems_of(REQUIRED + "train:\n  max-steps: 1\n  max_steps: 2\n", code=ExitCode.CONFIG)
    assert problems == ["run.yaml:5: train.max_steps: given twice; the first time on line 4"]


def test_a_file_that_is_not_there_or_no_text_is_told(tmp_path: Path) -> None:
    with pytest.raises(FtError, match=r"nowhere\.yaml: there is no such run file"):
        load_config(file=Path("nowhere.yaml"), flags={}, sets=(), env={})
    with pytest.raises(FtError, match="is a folder, not a run file"):
        load_config(file=tmp_path, flags={}, sets=(), env={})
    Path("run.yaml").write_bytes(b"model: \xff\n")
    with pytest.raises(FtError, match="byte 7 is not UTF-8"):
        load_config(file=Path("run.yaml"), flags={}, sets=(), env={})


def test_settings_of_lora_without_lora_are_not_ignored() -> None:
    problems = problems_of(REQUIRED, code=ExitCode.USAGE, flags={"model.lora_r": ("--lora-r", "8")})
    assert problems == ["--lora-r: has no effect without lora; add --lora (lora: true under model:)"]


def test_lora_that_is_switched_off_on_purpose_silences_its_settings() -> None:
    text = "model: {model: m, lora: true, lora_r: 8}\ndata: d\n"
    Path("run.yaml").write_text(text, encoding="utf-8")
    flags = {"model.lora": ("--no-lora", False)}
    assert load_config(file=Path("run.yaml"), flags=flags, sets=(), env={}).config.model.lora is False


def test_evaluation_without_rows_and_from_two_places_are_refused() -> None:
    assert problems_of(REQUIRED + "train: {eval_steps: 5}\n", code=ExitCode.CONFIG) == [
        "run.yaml:3: train.eval_steps: there are no rows to evaluate on; add --eval-split SHARE or --eval-dataset DATA"
    ]
    text = "model: m\ndata: {dataset: d, eval_dataset: e, eval_split: 0.1}\n"
    assert problems_of(text, code=ExitCode.CONFIG) == [
        "run.yaml:2: data.eval_split: eval_dataset is given too (run.yaml:2); give one of them"
    ]


SECRET = "hf_" + "abcdefghijklmnopqrstuv"


@pytest.mark.parametrize(
    ("text", "given"),
    [
        (f"train: {{hub_token: {SECRET}}}", {}),
        (f"train: {{learning_rate: {SECRET}}}", {}),
        (f"train: {{seed: [{SECRET}]}}", {}),
        (f"my_password: {SECRET}", {}),
        ("", {"sets": (f"api_token {SECRET}",)}),
        ("", {"sets": (f"train.adam_beta1=[{SECRET}",)}),
        ("", {"flags": {"train.seed": ("--seed", SECRET)}, "sets": (f"train.seed={SECRET}",)}),
        ("launch: {api_key: secret-one}", {"sets": ("launch.api_key=secret-two", "launch.api_key=secret-three")}),
    ],
)
def test_a_secret_is_never_shown(text: str, given: dict[str, Any]) -> None:
    Path("run.yaml").write_text(REQUIRED + text + "\n", encoding="utf-8")
    with pytest.raises(FtError) as caught:
        load_config(file=Path("run.yaml"), **{"flags": {}, "sets": (), "env": {}, **given})
    assert SECRET not in str(caught.value)
    assert "secret-" not in str(caught.value)
