"""flag > environment > run file > strongest detection > default, and every choice says why."""

from __future__ import annotations

from typing import Any

import pytest

from fleettune_core.config.schema import Backend, Launch, RunConfig
from fleettune_core.config.source import LoadedConfig, Source
from fleettune_core.errors import ExitCode, FtError
from fleettune_core.plugins.entries import PluginKind
from fleettune_core.plugins.selection import Asked, asked_for, choose_backend, choose_launcher
from fleettune_core.types import Detection, ProcessInfo, Score

FLAG = Source(kind="flag", where="--launcher")
VARIABLE = Source(kind="environment", where="FT_LAUNCHER")
FILE = Source(kind="file", where="run.yaml:3")


def rank(index: int, of: int) -> ProcessInfo:
    return ProcessInfo(rank=index, local_rank=index, world_size=of, local_world_size=of)


AVAILABLE = Detection(score=Score.AVAILABLE, reason="sbatch found")
INSIDE = Detection(score=Score.INSIDE, reason="inside SLURM job 7")
STARTED = Detection(score=Score.STARTED_BY, reason="started by srun, job 7", process=rank(0, 2))
INNER = Detection(score=Score.STARTED_BY_INNER, reason="started by torchrun", process=rank(1, 2))


@pytest.fixture
def entries(make_entry: Any) -> list[Any]:
    return [
        make_entry("local", distribution="fleettune-core", builtin=True),
        make_entry("slurm", distribution="launcher-slurm"),
        make_entry("torchrun", distribution="launcher-torchrun"),
    ]


def asks(**names: str) -> list[Asked]:
    sources = {"flag": FLAG, "variable": VARIABLE, "file": FILE}
    return [Asked(name=name, source=sources[who]) for who, name in names.items()]


@pytest.mark.parametrize(
    ("asked", "detections", "devices", "expected", "reason"),
    [
        ({"file": "slurm", "variable": "torchrun", "flag": "local"}, {"slurm": INSIDE}, 8, "local", "--launcher; wins"),
        ({"file": "slurm", "variable": "local"}, {"slurm": INSIDE}, 8, "local", "FT_LAUNCHER; wins over slurm"),
        ({"file": "local"}, {"slurm": INSIDE}, 8, "local", "run.yaml:3; wins over slurm (inside SLURM job 7)"),
        ({"file": "local", "flag": "local"}, {}, 8, "local", "--launcher"),
        ({}, {"slurm": INSIDE}, 8, "slurm", "inside SLURM job 7"),
        ({}, {"slurm": STARTED, "torchrun": INNER}, 8, "torchrun", "started by torchrun; wins over slurm"),
        ({}, {"slurm": INSIDE, "torchrun": INNER}, 8, "torchrun", "started by torchrun; wins over slurm"),
        ({}, {"slurm": AVAILABLE}, 8, "torchrun", "default: 8 devices on this machine, one process each"),
        ({}, {"slurm": AVAILABLE}, 1, "local", "default: one process"),
        ({}, {}, 1, "local", "default: one process"),
    ],
)
def test_precedence(
    entries: list[Any],
    asked: dict[str, str],
    detections: dict[str, Detection],
    devices: int,
    expected: str,
    reason: str,
) -> None:
    result = choose_launcher(entries=entries, asked=asks(**asked), detections=detections, devices=devices)
    assert result.choice.name == result.entry.name == expected
    assert result.choice.reason.startswith(reason)
    if "wins" not in reason:
        assert result.choice.reason == reason
    assert result.choice.distribution == result.entry.source


@pytest.mark.parametrize(
    ("devices", "nproc", "nodes", "expected"),
    [
        (1, None, 1, "local"),
        (1, 1, 1, "local"),
        (8, 1, 1, "local"),
        (1, 2, 1, "torchrun"),
        (2, None, 1, "torchrun"),
        (1, 1, 2, "torchrun"),
    ],
)
def test_the_default_is_torchrun_for_more_than_one_process(
    entries: list[Any], devices: int, nproc: int | None, nodes: int, expected: str
) -> None:
    result = choose_launcher(entries=entries, devices=devices, nproc_per_node=nproc, nodes=nodes)
    assert result.choice.name == expected
    assert result.process is None


def test_available_never_wins_but_is_offered(entries: list[Any]) -> None:
    offered = choose_launcher(entries=entries, detections={"slurm": AVAILABLE})
    assert offered.notes == ("sbatch found; add --launcher slurm to submit",)
    taken = choose_launcher(entries=entries, asked=asks(flag="slurm"), detections={"slurm": AVAILABLE})
    assert taken.notes == ()
    assert taken.process is None


def test_losers_are_kept_strongest_first(entries: list[Any]) -> None:
    asked = asks(file="slurm", variable="torchrun", flag="local")
    result = choose_launcher(entries=entries, asked=asked, detections={"slurm": INSIDE})
    assert result.beat == (
        ("FT_LAUNCHER", "torchrun"),
        ("run.yaml:3", "slurm"),
        ("inside SLURM job 7", "slurm"),
    )


def test_two_equal_detections_are_an_error_that_names_both_distributions(entries: list[Any]) -> None:
    also = Detection(score=Score.INSIDE, reason="inside another cluster")
    with pytest.raises(FtError) as caught:
        choose_launcher(entries=entries, detections={"slurm": INSIDE, "torchrun": also})
    assert caught.value.exit_code is ExitCode.PLUGIN
    assert caught.value.problems == (
        "slurm (launcher-slurm 1.0): inside SLURM job 7",
        "torchrun (launcher-torchrun 1.0): inside another cluster",
    )
    assert caught.value.hint == "say which one: --launcher slurm or --launcher torchrun"
    chosen = choose_launcher(entries=entries, asked=asks(flag="slurm"), detections={"slurm": INSIDE, "torchrun": also})
    assert chosen.choice.name == "slurm"


@pytest.mark.parametrize(
    ("who", "exit_code", "place"),
    [
        ("flag", ExitCode.USAGE, "--launcher"),
        ("variable", ExitCode.USAGE, "FT_LAUNCHER"),
        ("file", ExitCode.CONFIG, "run.yaml:3"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(
    entries: list[Any], who: str, exit_code: ExitCode, place: str
) -> None:
    with pytest.raises(FtError) as caught:
        choose_launcher(entries=entries, asked=asks(**{who: "torchrn"}))
    assert caught.value.exit_code is exit_code
    assert caught.value.message == f"{place}: no launcher is named 'torchrn' (did you mean torchrun?)"
    assert caught.value.hint == "installed launchers: local, slurm, torchrun"


def test_a_name_of_two_distributions_is_an_error_for_who_asks(entries: list[Any], make_entry: Any) -> None:
    both = [*entries, make_entry("slurm", distribution="other-slurm")]
    with pytest.raises(FtError) as caught:
        choose_launcher(entries=both, asked=asks(flag="slurm"))
    assert caught.value.exit_code is ExitCode.PLUGIN
    assert "launcher-slurm 1.0" in str(caught.value)
    assert "other-slurm 1.0" in str(caught.value)
    assert choose_launcher(entries=both).choice.name == "local"


@pytest.mark.parametrize(
    ("who", "hint"),
    [
        ("flag", "leave --launcher out, or run ft outside of it"),
        ("variable", "unset FT_LAUNCHER, or run ft outside of it"),
        ("file", "leave the launcher out of run.yaml:3, or run ft outside of it"),
    ],
)
def test_a_rank_is_not_launched_again_by_another_launcher(entries: list[Any], who: str, hint: str) -> None:
    with pytest.raises(FtError) as caught:
        choose_launcher(entries=entries, asked=asks(**{who: "local"}), detections={"torchrun": INNER})
    assert caught.value.exit_code is ExitCode.USAGE
    assert "this process already is rank 1 of 2, started by torchrun" in caught.value.message
    assert caught.value.hint == hint


def test_a_rank_keeps_its_process_whether_detected_or_asked_for(entries: list[Any]) -> None:
    for asked in ([], asks(flag="torchrun")):
        result = choose_launcher(entries=entries, asked=asked, detections={"torchrun": INNER, "slurm": STARTED})
        assert result.choice.name == "torchrun"
        assert result.process == rank(1, 2)
    with pytest.raises(FtError, match="started by torchrun"):
        choose_launcher(entries=entries, asked=asks(flag="slurm"), detections={"torchrun": INNER, "slurm": STARTED})


def test_a_shell_of_a_scheduler_which_is_its_only_rank_may_launch(entries: list[Any]) -> None:
    alone = Detection(score=Score.STARTED_BY, reason="started by srun", process=rank(0, 1))
    result = choose_launcher(
        entries=entries, asked=asks(flag="torchrun"), detections={"slurm": alone}, nproc_per_node=4
    )
    assert result.choice.name == "torchrun"
    assert result.process is None


def test_a_default_that_is_not_installed_is_an_error_and_no_fallback(entries: list[Any]) -> None:
    with pytest.raises(FtError) as caught:
        choose_launcher(entries=entries[:1], devices=8)
    assert caught.value.exit_code is ExitCode.PLUGIN
    assert caught.value.hint is not None
    assert "pip install fleettune-launcher-torchrun" in caught.value.hint


def test_the_backend_is_chosen_by_the_same_rules(make_entry: Any) -> None:
    backends = [make_entry("ddp", PluginKind.BACKEND), make_entry("acme", PluginKind.BACKEND)]
    assert choose_backend(entries=backends).choice.reason == "default"
    assert choose_backend(entries=backends).choice.name == "ddp"
    asked = [Asked(name="acme", source=Source(kind="environment", where="FT_BACKEND"))]
    assert choose_backend(entries=backends, asked=asked).choice.name == "acme"


def test_what_was_asked_is_read_from_the_config_and_the_environment() -> None:
    source = Source(kind="flag", where="--launcher", beat=(("FT_LAUNCHER", "slurm"), ("run.yaml:3", "torchrun")))
    loaded = LoadedConfig(config=RunConfig(launch=Launch(launcher="local")), sources={"launch.launcher": source})
    asked = asked_for(PluginKind.LAUNCHER, loaded, {"FT_LAUNCHER": "slurm"})
    assert [(item.name, item.source.kind) for item in asked] == [
        ("local", "flag"),
        ("slurm", "environment"),
        ("torchrun", "file"),
    ]
    unset = LoadedConfig(config=RunConfig(), sources={})
    assert asked_for(PluginKind.LAUNCHER, unset, {"FT_LAUNCHER": ""}) == ()
    (alone,) = asked_for(PluginKind.BACKEND, unset, {"FT_BACKEND": "acme", "FT_LAUNCHER": "x"})
    assert (alone.name, alone.source.where) == ("acme", "FT_BACKEND")
    in_file = LoadedConfig(
        config=RunConfig(backend=Backend(backend="ddp")),
        sources={"backend.backend": Source(kind="file", where="run.yaml:9")},
    )
    (from_file,) = asked_for(PluginKind.BACKEND, in_file, {})
    assert (from_file.name, from_file.source.kind) == ("ddp", "file")


@pytest.mark.parametrize("name", ["deepspeed", "fsdp"])
def test_a_backend_of_ours_that_is_not_installed_says_what_installs_it(make_entry: Any, name: str) -> None:
    ddp = make_entry("ddp", kind=PluginKind.BACKEND, distribution="fleettune-core", builtin=True)
    asked = Asked(name=name, source=Source(kind="flag", where="--backend"))
    with pytest.raises(FtError) as caught:
        choose_backend(entries=[ddp], asked=(asked,))
    assert caught.value.message == f"--backend: the backend {name} is not installed"
    assert caught.value.hint == f"pip install fleettune-backend-{name}; installed backends: ddp"
