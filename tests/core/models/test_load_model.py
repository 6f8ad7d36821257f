"""Loading, in a worker: GGUF files become ordinary folders once; mistakes become one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fleettune_core.config.schema import Model
from fleettune_core.errors import ExitCode, FtError
from fleettune_core.models import load
from fleettune_core.models.load import load_model, load_tokenizer, materialise
from fleettune_core.models.resolve import resolve_model

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "ab"] + [chr(code) for code in range(0x21, 0x5B)]


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A Llama of one layer with Q4_1 matrices and a byte-pair tokenizer; returns its dequantised tensors."""
    import gguf

    hidden, inner, heads = 64, 96, 2
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(0)
    exact: dict[str, np.ndarray] = {}
    matrices = {
        "token_embd": (len(TOKENS), hidden),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (hidden, hidden),
        "blk.0.attn_v": (hidden, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_gate": (inner, hidden),
        "blk.0.ffn_up": (inner, hidden),
        "blk.0.ffn_down": (hidden, inner),
    }
    kind = gguf.GGMLQuantizationType.Q4_1
    for name, shape in matrices.items():
        quantised = gguf.quants.quantize(rng.normal(0, 0.1, shape).astype(np.float32), kind)
        writer.add_tensor(f"{name}.weight", quantised, raw_dtype=kind)
        exact[name] = gguf.quants.dequantize(quantised, kind)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return exact


@pytest.fixture(scope="module")
def gguf_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return file, write_gguf(file)


@pytest.fixture(scope="module")
def converted(gguf_model: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> load.ModelSource:
    """The GGUF model, dequantised once for all tests that read it."""
    return materialise(resolve_model(str(gguf_model[0])), Model(), tmp_path_factory.mktemp("cache"))


def test_a_gguf_model_is_dequantised_without_losing_a_bit(
    converted: load.ModelSource, gguf_model: tuple[Path, dict[str, np.ndarray]]
) -> None:
    exact = gguf_model[1]
    state = load_model(converted, Model(), dtype=torch.float32).state_dict()
    for ours, theirs in (
        ("token_embd", "model.embed_tokens"),
        ("blk.0.ffn_down", "model.layers.0.mlp.down_proj"),
        ("blk.0.attn_v", "model.layers.0.self_attn.v_proj"),
    ):
        assert np.array_equal(state[f"{theirs}.weight"].numpy(), exact[ours]), ours


def test_a_gguf_model_can_be_saved_again_and_loads_without_us(converted: load.ModelSource, tmp_path: Path) -> None:
    model = load_model(converted, Model(), dtype=torch.float32)
    model.save_pretrained(tmp_path / "again")
    load_tokenizer(converted, Model()).save_pretrained(tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
    code = (
        "import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T\n"
        "m = M.from_pretrained(sys.argv[1]); t = T.from_pretrained(sys.argv[1])\n"
        "print(m.num_parameters(), t('ab').input_ids, t.chat_template, 'fleettune_core' in sys.modules)"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "again")],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert done.stdout.strip() == f"{model.num_parameters()} [5] {TEMPLATE} False"


def test_the_tokenizer_keeps_template_special_tokens_and_length(converted: load.ModelSource) -> None:
    tokenizer = load_tokenizer(converted, Model())
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", "</s>")
    assert tokenizer.model_max_length == 128
    assert (converted.folder / "generation_config.json").is_file()


def test_a_gguf_model_is_dequantised_once(
    gguf_model: tuple[Path, Any], converted: load.ModelSource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(load, "_dequantise", never)
    copy = tmp_path / "tiny.gguf"
    copy.write_bytes(gguf_model[0].read_bytes())
    # The same content under another path is the same entry of the cache.
    again = materialise(resolve_model(str(copy)), Model(), converted.folder.parent.parent)
    assert again == converted


def test_another_content_is_another_entry(gguf_model: tuple[Path, Any], tmp_path: Path) -> None:
    copy = tmp_path / "tiny.gguf"
    made: list[Path] = []
    for text in (b"", b"\0"):
        copy.write_bytes(gguf_model[0].read_bytes() + text)
        made.append(materialise(resolve_model(str(copy)), Model(), tmp_path / "cache").folder)
    assert made[0] != made[1]


def test_an_interrupted_conversion_leaves_nothing_that_looks_whole(
    gguf_model: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = load._dequantise

    def dies(_: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(load, "_dequantise", dies)
    ref = resolve_model(str(gguf_model[0]))
    with pytest.raises(KeyboardInterrupt):
        materialise(ref, Model(), tmp_path)
    assert [path for path in (tmp_path / "models").iterdir() if not path.name.startswith(".")] == []
    monkeypatch.setattr(load, "_dequantise", real)
    folder = materialise(ref, Model(), tmp_path).folder
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


def test_processes_that_want_it_at_once_convert_it_once(gguf_model: tuple[Path, Any], tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from fleettune_core.models import load; real = load._dequantise\n"
        "def counted(file, folder):\n"
        "    (pathlib.Path(sys.argv[2]) / f'made-{__import__(\"os\").getpid()}').touch(); real(file, folder)\n"
        "load._dequantise = counted\n"
        "from fleettune_core.config.schema import Model; from fleettune_core.models.resolve import resolve_model\n"
        "print(load.materialise(resolve_model(sys.argv[1]), Model(), pathlib.Path(sys.argv[2])).folder)"
    )
    command = [sys.executable, "-c", code, str(gguf_model[0]), str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    # The last line: what transformers imports may print before it.
    folders = [process.communicate()[0].splitlines()[-1] for process in running]
    assert folders[0] == folders[1]
    assert Path(folders[0], "model.safetensors").is_file()
    assert len(list(tmp_path.glob("made-*"))) == 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def source_of(folder: Path) -> load.ModelSource:
    return materialise(resolve_model(str(folder)), Model(), folder.parent / "cache")


def refusal(folder: Path, **settings: Any) -> FtError:
    with pytest.raises(FtError) as caught:
        load_model(source_of(folder), Model(**settings), dtype=torch.float32)
    assert caught.value.exit_code is ExitCode.CONFIG
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_come_in_the_dtype_that_was_asked(folder: Path, dtype: torch.dtype) -> None:
    model = load_model(source_of(folder), Model(), dtype=dtype)
    assert {weight.dtype for weight in model.parameters()} == {dtype}


def test_the_attention_kernel_is_the_one_asked_for(folder: Path) -> None:
    model = load_model(source_of(folder), Model(attn_implementation="eager"), dtype=torch.float32)
    assert model.config._attn_implementation == "eager"


def test_an_unknown_attention_kernel_is_one_line(folder: Path) -> None:
    error = refusal(folder, attn_implementation="flesh")
    assert "flesh" in error.message
    assert "--attn-implementation" in (error.hint or "")


def test_a_folder_without_weights_says_so(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "holds no weights" in refusal(folder).message


def test_missing_weights_are_not_made_up(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    del state["model.layers.0.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.0.mlp.up_proj.weight" in refusal(folder).message


def test_a_cut_off_weights_file_is_one_line(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refusal(folder)


def test_an_unknown_model_type_is_one_line(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "brandnew"}))
    error = refusal(folder)
    assert "brandnew" in error.message
    assert "update transformers" in (error.hint or "")


def test_code_of_a_model_is_not_run_unasked(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    changed = config | {
        "model_type": "brandnew",
        "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.M"},
    }
    (folder / "config.json").write_text(json.dumps(changed))
    (folder / "own.py").write_text("raise SystemExit('was run')\n")
    assert "--trust-remote-code" in (refusal(folder).hint or "")


def test_a_hub_model_that_is_not_here_is_one_line_offline(tmp_path: Path) -> None:
    with pytest.raises(FtError) as caught:
        materialise(resolve_model("fleettune-tests/does-not-exist"), Model(), tmp_path)
    assert caught.value.exit_code is ExitCode.CONFIG
    assert (
        caught.value.message == "model fleettune-tests/does-not-exist is not on this machine and HF_HUB_OFFLINE is set"
    )


def test_a_hub_model_keeps_its_name_as_the_base(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def snapshot_download(repo: str, *, revision: str | None, **_: Any) -> str:
        asked.append((repo, revision))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    source = materialise(resolve_model("org/name"), Model(revision="v2"), tmp_path)
    assert asked == [("org/name", "v2")]
    model = load_model(source, Model(), dtype=torch.float32)
    assert model.name_or_path == "org/name"
    # And it is no hub name that a saved copy would be looked up under.
    model.save_pretrained(tmp_path / "saved")
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved")


class GatedRepoError(Exception):
    """Stands for the hub client's, which needs a response of its server to be made."""


class RepositoryNotFoundError(Exception):
    """As above."""


class RevisionNotFoundError(Exception):
    """As above."""


@pytest.mark.parametrize(
    ("kind", "words", "hint"),
    [
        (GatedRepoError, "is gated", "hf auth login"),
        (RepositoryNotFoundError, "the hub has no model org/name", "check its name"),
        (RevisionNotFoundError, "no revision v9", "--model-revision"),
        (ConnectionError, "not on this machine", "local folder"),
    ],
)
def test_what_the_hub_says_becomes_one_line(kind: type[Exception], words: str, hint: str) -> None:
    error: Exception = OSError("wrapped\nby transformers")
    error.__cause__ = kind("a long story")
    told = load.explain_load_error(error, name="org/name", what="model", revision="v9")
    assert words in told.message
    assert hint in (told.hint or "")
    assert "\n" not in told.message


def test_a_base_that_is_in_the_cache_is_kept_beside_its_adapter(converted: load.ModelSource, tmp_path: Path) -> None:
    assert converted.cached
    kept = load.keep_base(converted, tmp_path / "base")
    assert (kept.name, kept.cached) == (str(tmp_path / "base"), False)
    weights = kept.folder / "model.safetensors"
    assert weights.samefile(converted.folder / "model.safetensors")  # no second copy on the same disk
    assert load.keep_base(converted, tmp_path / "base") == kept
    AutoModelForCausalLM.from_pretrained(kept.folder)


def test_a_base_on_another_disk_is_copied(
    converted: load.ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    kept = load.keep_base(converted, tmp_path / "base")
    weights = "model.safetensors"
    assert (kept.folder / weights).read_bytes() == (converted.folder / weights).read_bytes()
    assert not (kept.folder / weights).samefile(converted.folder / weights)


def test_sampling_values_without_sampling_do_not_keep_a_result_from_being_saved(folder: Path, tmp_path: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.6, "top_p": 0.9}))
    model = load_model(materialise(resolve_model(str(folder)), Model(), tmp_path), Model(), dtype=torch.float32)
    model.generation_config.pad_token_id = 2  # what Trainer does with the tokenizer's
    model.save_pretrained(tmp_path / "saved")
