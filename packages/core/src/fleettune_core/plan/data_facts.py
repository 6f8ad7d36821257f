"""What control can see of the data: whether it is there, how it will be read, and whether the settings fit it."""

from __future__ import annotations

from fleettune_core.config.source import LoadedConfig
from fleettune_core.data.files import find_files
from fleettune_core.data.peek import check_kept_back, peek
from fleettune_core.plan.mistakes import Mistakes, said_at
from fleettune_core.plan.model import DataSummary


def look_at_data(loaded: LoadedConfig, mistakes: Mistakes) -> DataSummary | None:
    """A look at the rows; None where there is a mistake, which `mistakes` then has, or `loaded` already had."""
    data = loaded.config.data
    here = Mistakes()
    for name in ("dataset", "eval_dataset"):
        spec: str | None = getattr(data, name)
        if spec is not None:
            with here, said_at(loaded.source(f"data.{name}")):
                find_files(spec)
    # Rows that are read in another way than the one that was meant would only make more mistakes.
    if data.dataset is None or here or loaded.wrong & {"data.format", "data.max_rows"}:
        with mistakes:
            here.raise_all()
        return None
    summary = None
    with mistakes:
        summary = peek(data)
    with mistakes, said_at(loaded.source("data.eval_split")):
        check_kept_back(data, summary.rows if summary is not None else None)
    return summary


def data_notes(loaded: LoadedConfig, data: DataSummary) -> list[str]:
    """Settings of hub data that files do not have."""
    evaluation = loaded.config.data.eval_dataset
    if not data.files or (evaluation is not None and find_files(evaluation) is None):
        return []
    return [
        f"{name} ({loaded.source(f'data.{name}').where}) has no effect here: the rows are read from files"
        for name in ("dataset_split", "dataset_config")
        if loaded.is_set(f"data.{name}")
    ]
