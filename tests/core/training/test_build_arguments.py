"""What a plugin asks for before the model exists never beats what the user said without a word."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fleettune_core.config.schema import Model, RunConfig, Train
from fleettune_core.config.source import Source
from fleettune_core.errors import FtError
from fleettune_core.training import build
from fleettune_core.types import BatchPlan, DeviceKind, ProcessInfo, TrainingRun

TYPED = Source(kind="flag", where="--optim")


def run(train: Train | None = None) -> TrainingRun:
    return TrainingRun(
        config=RunConfig(train=train or Train()),
        options=None,
        process=ProcessInfo(rank=0, local_rank=0, world_size=1, local_world_size=1),
        batch=BatchPlan(global_batch=8, micro_batch=4, accumulation=2, ranks=1),
        precision="fp32",
        device_kind=DeviceKind.CPU,
        run_dir=Path("run"),
    )


class Asking:
    """A relay whose plugins answer `configure_training` with these."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = answers

    def call(self, hook_name: str, **arguments: Any) -> list[dict[str, Any]]:
        assert hook_name == "configure_training"
        return list(self.answers)


def configured(*answers: dict[str, Any], sources: dict[str, Source] | None = None) -> dict[str, Any]:
    relay: Any = Asking(*answers)
    return build.configured_by(relay, run(), sources or {})


def test_what_nobody_said_is_the_backends_to_choose():
    assert configured({"optim": "sgd"}, {"torch_compile": False}) == {"optim": "sgd", "torch_compile": False}
    assert build.training_arguments(run(), {"optim": "sgd"}, has_eval=False)["optim"] == "sgd"


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("optim", "train.optim", "sgd"),
        ("activation_checkpointing", "train.gradient_checkpointing", True),
        ("bf16", "train.precision", True),
        ("adam_beta1", "train.adam_beta1", 0.5),
    ],
)
def test_what_the_user_said_is_an_error_that_names_both(name, path, value):
    with pytest.raises(FtError) as caught:
        configured({name: value}, sources={path: TYPED})
    assert str(caught.value).startswith(f"--optim: {path} makes {name} ")
    assert f"needs {value!r}" in str(caught.value)


def test_the_same_value_is_no_clash():
    assert configured({"optim": "adamw_torch"}, sources={"train.optim": TYPED}) == {"optim": "adamw_torch"}
    solved = replace(TYPED, kind="solved")
    assert configured({"optim": "sgd"}, sources={"train.optim": solved}) == {"optim": "sgd"}


def test_two_plugins_that_disagree_are_named():
    with pytest.raises(FtError, match=r"two plugins want train\.optim to be 'sgd' and 'lion_8bit'"):
        configured({"optim": "sgd"}, {"optim": "lion_8bit"})


def test_an_adapter_names_the_revision_of_its_base():
    config = build.lora_config(Model(model="some/model", revision="v2", lora=True))
    assert config.revision == "v2"


@pytest.mark.parametrize("target", [None, "all-linear", "q_proj", "layers.0.q_proj,k_proj", "embed"])
def test_targets_are_ends_of_module_names(target):
    layer = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(2, 2), "k_proj": torch.nn.Linear(2, 2)})
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(3, 2), "layers": torch.nn.ModuleList([layer])})
    build.check_targets(model, target)


def test_a_target_that_is_nowhere_is_told_with_the_nearest():
    model = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(2, 2)})
    with pytest.raises(FtError, match=r"q_prj is no layer .* \(did you mean q_proj\?\)"):
        build.check_targets(model, "q_prj")


def test_an_older_transformers_gets_the_name_that_it_knows():
    @dataclass
    class Older:
        gradient_checkpointing: bool = False
        optim: str = "adamw_torch"

    given = {"activation_checkpointing": True, "optim": "sgd"}
    assert build._as_spelt_by(Older, given) == {"gradient_checkpointing": True, "optim": "sgd"}
    from trl import SFTConfig

    assert "activation_checkpointing" in build._as_spelt_by(SFTConfig, given)
