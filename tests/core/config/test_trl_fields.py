"""The table of TRL's fields is the installed TRL's, and what Fleettune owns in it has an answer."""

from __future__ import annotations

import re
import subprocess
import sys
import typing
from importlib.metadata import version
from pathlib import Path

import pytest

from fleettune_core.config import trl_fields
from fleettune_core.config.fields import settings_of
from fleettune_core.config.known import settings_by_path
from fleettune_core.config.schema import Train
from fleettune_core.config.trl_fields import OWNED, fields_for, made_from

ROOT = Path(__file__).resolve().parents[3]
TABLE = Path(trl_fields.__file__).with_name("trl_fields.json")


newest = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.10 gets older releases of TRL; the table describes the newest"
)


@newest
def test_the_table_is_what_the_installed_trl_declares() -> None:
    fresh = subprocess.run(
        [sys.executable, str(ROOT / "tools/generate_trl_fields.py"), "--stdout"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    said = "TRL or transformers moved: run `python tools/generate_trl_fields.py` and look at what changed"
    assert TABLE.read_text(encoding="utf-8") == fresh, said


@newest
def test_the_table_says_which_versions_it_was_made_from() -> None:
    assert dict(made_from()) == {"trl": version("trl"), "transformers": version("transformers")}


def test_a_field_has_type_default_and_help() -> None:
    field = fields_for("sft")["adam_beta1"]
    assert (field.type, field.default, field.annotation) == ("float", "0.9", float)
    assert field.help.startswith("The exponential decay rate")
    assert fields_for("sft")["neftune_noise_alpha"].annotation == (float | None)
    assert fields_for("sft")["gradient_checkpointing_kwargs"].annotation == (dict[str, typing.Any] | str | None)
    assert "cosine" in fields_for("sft")["lr_scheduler_type"].choices


@pytest.mark.parametrize("name", sorted(fields_for("sft")))
def test_every_type_of_the_table_can_be_read(name: str) -> None:
    assert fields_for("sft")[name].annotation is not None


def test_an_unknown_method_has_no_fields() -> None:
    with pytest.raises(KeyError):
        fields_for("no-such-method")


def test_what_is_owned_exists_in_trl() -> None:
    assert set(OWNED) <= set(fields_for("sft"))


def test_a_setting_of_our_own_is_not_called_owned() -> None:
    assert not set(OWNED) & {setting.name for setting in settings_of(Train)}


def test_what_to_use_instead_exists() -> None:
    flags = {flag for setting in settings_by_path().values() for flag in setting.flags}
    named = {flag for text in OWNED.values() for flag in re.findall(r"--[a-z-]+", text)}
    assert named
    assert named <= flags


def test_fields_that_move_numbers_between_layouts_cannot_be_set() -> None:
    """Each of these would break `one global batch, one loss curve` without a word."""
    assert {
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "average_tokens_across_devices",
        "dataloader_drop_last",
        "train_sampling_strategy",
        "packing",
        "bf16",
        "fp16",
    } <= set(OWNED)
