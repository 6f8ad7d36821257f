"""Loading the model and its tokenizer. Worker side: transformers is imported here.

Every model becomes a folder first (`materialise`): a hub model is fetched into the hub's cache, a GGUF file is
dequantised into ours. That happens before the process group exists, since it may take long; afterwards all ranks read
the same files, without the network.
"""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import transformers
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

from fleettune_core.config.schema import Model
from fleettune_core.errors import FtError
from fleettune_core.models.resolve import ModelRef, nearest_sibling

GGUF_CONVERSION = 1
"""Part of the cache's key: raise it whenever `_dequantise` writes something else."""

_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py", "*.tiktoken")
_NOT_HUB_FILES = ("*/*", "consolidated*")
"""Other formats of the same weights: exports in folders of their own, and Mistral's second copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model on this machine's disk, ready for `from_pretrained`."""

    folder: Path
    name: str
    """What a result names as its base: the hub id, or the folder."""
    cached: bool = False
    """Whether the folder is in Fleettune's cache, which may be emptied any day."""


def materialise(ref: ModelRef, model: Model, cache_dir: Path) -> ModelSource:
    """Bring the model that `ref` means onto this disk as an ordinary folder.

    A GGUF file is dequantised once and kept under `cache_dir/models`, keyed by its content; processes that want it
    at the same time wait for the first. Raises `FtError` (exit code 5) in one line for what the hub or the file lacks.
    """
    if ref.gguf_path is not None:
        folder = _dequantised(ref.gguf_path, cache_dir)
        return ModelSource(folder=folder, name=str(folder), cached=True)
    if ref.path is not None:
        return ModelSource(folder=ref.path, name=str(ref.path))
    return ModelSource(folder=_fetch(ref.spec, model.revision), name=ref.spec)


def load_tokenizer(source: ModelSource, model: Model) -> Any:
    """The model's tokenizer (`transformers.PreTrainedTokenizerBase`), with its chat template where it has one."""
    return _explained(
        source,
        lambda: AutoTokenizer.from_pretrained(source.folder, trust_remote_code=model.trust_remote_code),
        what="tokenizer",
    )


def load_model(source: ModelSource, model: Model, *, dtype: torch.dtype) -> Any:
    """The model (`transformers.PreTrainedModel`) on the CPU, its weights in `dtype`.

    Raises `FtError` (exit code 5) when the folder holds no weights or not all of them: transformers would start the
    missing ones at random with no more than a warning.
    """
    if not any(source.folder.glob("*.safetensors")) and not any(source.folder.glob("*.bin")):
        raise FtError(
            f"model {source.name}: {source.folder} holds no weights",
            hint="a model folder holds *.safetensors or *.bin files beside its config.json",
        )
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": model.trust_remote_code}
    if model.attn_implementation is not None:
        options["attn_implementation"] = model.attn_implementation
    loaded, report = _explained(
        source,
        lambda: AutoModelForCausalLM.from_pretrained(source.folder, output_loading_info=True, **options),
        what="model",
    )
    missing = sorted(report["missing_keys"])
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise FtError(
            f"model {source.name}: weights are missing: {', '.join(missing[:3])}{more}",
            hint="the files belong to another architecture than config.json says, or are incomplete",
        )
    # PEFT writes it into the adapter as its base: a hub id loads anywhere, a path of this machine's cache does not.
    loaded.name_or_path = source.name
    loaded.config.name_or_path = source.name
    _mend_generation_config(loaded)
    return loaded


def keep_base(source: ModelSource, place: Path) -> ModelSource:
    """`source` as a folder at `place` (of the run): hard links where the disk allows, else copies.

    For an adapter whose base is in the cache only: it would not load any more once the cache is emptied.
    """

    def link(origin: str, target: str) -> str:
        try:
            os.link(origin, target)
        except OSError:
            shutil.copy2(origin, target)
        return target

    if not place.is_dir():
        unfinished = place.with_name(f".{place.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(source.folder, unfinished, copy_function=link)
        unfinished.rename(place)
    return ModelSource(folder=place, name=str(place))


def _mend_generation_config(model: Any) -> None:
    """Models are published with sampling values beside `do_sample: false`; transformers warns when it loads them, and
    refuses to save them, which would be after the training."""
    config = model.generation_config
    if config is None:
        return
    try:
        config.validate(strict=True)
    except ValueError:
        config.do_sample = True


# GGUF


def _dequantised(file: Path, cache_dir: Path) -> Path:
    """The folder that `file` was dequantised into, made when it is not there yet."""
    with file.open("rb") as stream:
        digest = _digest(stream)
    # transformers does the conversion: another release may do it differently.
    key = f"{digest[:24]}-{GGUF_CONVERSION}-{transformers.__version__}"
    models = cache_dir / "models"
    folder = models / f"{file.stem}-{key}"
    if folder.is_dir():
        return folder
    models.mkdir(parents=True, exist_ok=True)
    with FileLock(models / f".{key}.lock"):
        if not folder.is_dir():
            unfinished = models / f".{key}.unfinished"
            # Whoever left it is gone: the lock is ours.
            shutil.rmtree(unfinished, ignore_errors=True)
            _dequantise(file, unfinished)
            unfinished.rename(folder)
    return folder


def _digest(stream: BinaryIO) -> str:
    """SHA-256 of a stream, in hex (`hashlib.file_digest` is not in Python 3.10)."""
    digest = hashlib.sha256()
    while block := stream.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _dequantise(file: Path, folder: Path) -> None:
    """Write `file` as an ordinary model folder.

    In fp32, because that alone is exact: a dequantised weight is scale × integer + minimum of two fp16 numbers, and in
    SmolLM2's Q4_1 file 79 % of them change in bf16, 42 % in fp16. Loading it costs little (0.9 s into bf16).
    """
    source = ModelSource(folder=file.parent, name=file.name)
    arguments = {"gguf_file": file.name}
    model = _explained(
        source,
        lambda: AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **arguments),
        what="model",
    )
    # transformers takes the weights for quantised ones still, and refuses to save them ("not serializable").
    model.hf_quantizer = None
    for owner, name in (
        (model, "is_quantized"),
        (model, "quantization_method"),
        (model.config, "quantization_config"),
        (model.config, "_model_name_or_path"),
    ):
        if name in vars(owner):
            delattr(owner, name)
    tokenizer = _explained(source, lambda: AutoTokenizer.from_pretrained(file.parent, **arguments), what="tokenizer")
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None:
        tokenizer.model_max_length = min(tokenizer.model_max_length, longest)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    del model
    gc.collect()


# The hub


def _fetch(repo: str, revision: str | None) -> Path:
    """The hub's own cached folder of `repo`, downloaded where it is missing."""
    from huggingface_hub import snapshot_download

    def download(*more: str) -> Path:
        patterns = [*_HUB_FILES, *more]
        return Path(
            snapshot_download(repo, revision=revision, allow_patterns=patterns, ignore_patterns=list(_NOT_HUB_FILES))
        )

    source = ModelSource(folder=Path(), name=repo)
    folder = _explained(source, download, what="model", revision=revision)
    if not any(folder.glob("*.safetensors")):
        folder = _explained(source, lambda: download("*.bin"), what="model", revision=revision)
    if not (folder / "config.json").is_file():
        raise FtError(
            f"model {repo}: there is no config.json in it{_not_everything_is_here()}",
            hint="a hub model for transformers has a config.json; GGUF repositories do not: download the .gguf file",
        )
    return folder


def _not_everything_is_here() -> str:
    return ", or not all of it was downloaded (HF_HUB_OFFLINE is set)" if _offline() else ""


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _explained(source: ModelSource, load: Callable[[], Any], *, what: str, revision: str | None = None) -> Any:
    """`load()`, with a failure that the user can mend turned into one line."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from safetensors import SafetensorError

    try:
        return load()
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError, HfHubHTTPError) as error:
        if isinstance(error, HFValidationError):
            raise FtError(f"model {source.name!r} is no hub id: {_first_line(error)}") from error
        raise explain_load_error(error, name=source.name, what=what, revision=revision) from error


def explain_load_error(error: BaseException, *, name: str, what: str, revision: str | None = None) -> FtError:
    """The `FtError` for an exception of huggingface_hub or transformers.

    Told by class names along the chain of causes: transformers wraps the hub's errors in OSError.
    """
    kinds = {kind.__name__ for link in _chain(error) for kind in type(link).__mro__}
    text = str(error)
    if "GatedRepoError" in kinds:
        return FtError(
            f"model {name} is gated: its owners want you to accept their terms first",
            hint=f"accept them at https://huggingface.co/{name}, then log in: hf auth login",
        )
    if "RevisionNotFoundError" in kinds:
        return FtError(f"model {name} has no revision {revision or 'main'}", hint="see --model-revision")
    if "RepositoryNotFoundError" in kinds:
        sibling = nearest_sibling(Path(name))
        local = f"; for the folder {sibling} write --model {sibling}" if sibling else ""
        return FtError(
            f"the hub has no model {name}, or it is private and you are not logged in",
            hint=f"check its name; for a private one: hf auth login{local}",
        )
    if kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "TransportError", "Timeout"}:
        why = "HF_HUB_OFFLINE is set" if _offline() else "the hub cannot be reached"
        mend = "unset HF_HUB_OFFLINE" if _offline() else "check the network (HTTPS_PROXY, HF_ENDPOINT)"
        return FtError(f"model {name} is not on this machine and {why}", hint=f"{mend}, or give a local folder")
    if "trust_remote_code" in text:
        return FtError(
            f"model {name} brings Python code of its own",
            hint="read it, and if you trust it: --trust-remote-code",
        )
    if "attn_implementation" in text or "flash_attn" in text or "FlashAttention" in text:
        return FtError(f"model {name}: {_first_line(error)}", hint="see --attn-implementation (sdpa works everywhere)")
    hint = "update transformers, or check config.json" if "model type" in text or "model_type" in text else None
    return FtError(f"cannot load the {what} {name}: {_first_line(error)}", hint=hint)


def _chain(error: BaseException | None) -> list[BaseException]:
    links: list[BaseException] = []
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or error.__context__
    return links


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
