"""Whole command lines of torchrun, and layouts that it cannot start."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleettune_core.errors import ExitCode, FtError
from fleettune_core.types import DeviceKind, Devices, LaunchRequest, Layout
from fleettune_launcher_torchrun import TorchrunLauncher
from fleettune_launcher_torchrun.argv import Endpoint, Options, build_argv, parse_endpoint, read_meeting

CPU = Devices(kind=DeviceKind.CPU, count=1, name="CPU", memory_bytes=8 << 30, bf16=False, cpu_cores=2)
WORKER = ("-m", "fleettune_core.worker", "/runs/r")


def request(layout: Layout, **changes: object) -> LaunchRequest:
    values: dict[str, object] = {
        "run_id": "demo-20260101-120000",
        "run_dir": Path("/runs/r"),
        "command": WORKER,
        "python": "/venv/bin/python",
        "layout": layout,
        "devices": CPU,
        "options": Options(),
        "environment": {"OMP_NUM_THREADS": "1"},
        **changes,
    }
    return LaunchRequest(**values)  # type: ignore[arg-type]


def two_nodes(**changes: object) -> LaunchRequest:
    layout = Layout(min_nodes=2, max_nodes=2, procs_per_node=4)
    return request(layout, **{"rdzv_endpoint": "gpu1:29500", **changes})


def test_one_machine_meets_at_a_free_port_whatever_its_host_name() -> None:
    assert build_argv(request(Layout(procs_per_node=2))) == (
        "/venv/bin/python",
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
        "--rdzv-id=demo-20260101-120000",
        "--local-addr=127.0.0.1",
        "--max-restarts=0",
        "--log-dir=/runs/r/logs/torchrun",
        "-m",
        "--",
        "fleettune_core.worker",
        "/runs/r",
    )


def test_a_fixed_number_of_machines_keeps_the_node_ranks_that_were_typed() -> None:
    assert build_argv(two_nodes(node_rank=1)) == (
        "/venv/bin/python",
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=4",
        "--node-rank=1",
        "--rdzv-backend=static",
        "--rdzv-endpoint=gpu1:29500",
        "--rdzv-id=fleettune",
        "--rdzv-conf=timeout=300",
        "--max-restarts=0",
        "--log-dir=/runs/r/logs/torchrun",
        "-m",
        "--",
        "fleettune_core.worker",
        "/runs/r",
    )


@pytest.mark.parametrize(("node_rank", "is_host"), [(0, "true"), (1, "false"), (3, "false")])
def test_an_elastic_runs_store_is_hosted_by_node_0_and_not_by_a_name(node_rank: int, is_host: str) -> None:
    layout = Layout(min_nodes=1, max_nodes=4, procs_per_node=8)
    options = Options(join_timeout_seconds=60, local_addr="10.0.0.7", rdzv_id="mine")
    asked = request(layout, rdzv_endpoint="alias:1234", node_rank=node_rank, max_restarts=3, options=options)
    assert build_argv(asked) == (
        "/venv/bin/python",
        "-m",
        "torch.distributed.run",
        "--nnodes=1:4",
        "--nproc-per-node=8",
        f"--node-rank={node_rank}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=alias:1234",
        "--rdzv-id=mine",
        f"--rdzv-conf=is_host={is_host},join_timeout=60,read_timeout=60,last_call_timeout=30",
        "--local-addr=10.0.0.7",
        "--max-restarts=3",
        "--log-dir=/runs/r/logs/torchrun",
        "-m",
        "--",
        "fleettune_core.worker",
        "/runs/r",
    )


def test_restarts_on_several_machines_need_the_rendezvous_that_notices_them() -> None:
    assert "--rdzv-backend=c10d" in build_argv(two_nodes(max_restarts=1))


def test_what_machines_must_share_does_not_depend_on_when_or_where_it_was_typed() -> None:
    first = build_argv(two_nodes(run_id="demo-1", run_dir=Path("/a")))
    second = build_argv(two_nodes(run_id="demo-2", run_dir=Path("/b"), node_rank=1))
    shared = ("--rdzv-id", "--rdzv-endpoint", "--rdzv-backend", "--nnodes")
    assert [word for word in first if word.startswith(shared)] == [word for word in second if word.startswith(shared)]


def test_the_same_request_gives_the_same_plan() -> None:
    launcher = TorchrunLauncher()
    assert launcher.plan_launch(two_nodes()) == launcher.plan_launch(two_nodes())


def test_a_scripts_own_options_stand_behind_a_double_dash() -> None:
    argv = build_argv(request(Layout(), command=("train.py", "--r=16", "--nnodes=9", "--", "-m")))
    assert argv[-6:] == ("--", "train.py", "--r=16", "--nnodes=9", "--", "-m")


def test_an_endpoint_without_a_port_gets_torchruns() -> None:
    assert "--rdzv-endpoint=gpu1:29500" in build_argv(two_nodes(rdzv_endpoint="gpu1"))


def test_a_run_id_that_is_no_file_name_still_names_torchruns_folder() -> None:
    assert "--rdzv-id=a_b_c" in build_argv(request(Layout(), run_id="a/b c"))


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("host:1", Endpoint(host="host", port=1)),
        ("10.0.0.1:29500", Endpoint(host="10.0.0.1", port=29500)),
        ("[fe80::1]:29500", Endpoint(host="fe80::1", port=29500)),
        ("[::1]", Endpoint(host="::1", port=29500)),
        ("a.b-c.example", Endpoint(host="a.b-c.example", port=29500)),
        ("host:", None),
        ("host:port", None),
        ("host:0", None),
        ("host:65536", None),
        ("tcp://host:1", None),
        ("fe80::1", None),
        ("", None),
    ],
)
def test_an_endpoint_is_host_and_port(text: str, endpoint: Endpoint | None) -> None:
    assert parse_endpoint(text) == endpoint
    if endpoint is not None:
        assert parse_endpoint(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    ("asked", "problems"),
    [
        (two_nodes(rdzv_endpoint=None), ["--nodes 2 needs --rdzv-endpoint HOST:PORT, the address of machine 0"]),
        (two_nodes(rdzv_endpoint="host:x"), ["--rdzv-endpoint host:x: not of the form HOST:PORT"]),
        (two_nodes(node_rank=2), ["--node-rank 2: with --nodes 2 it goes from 0 to 1"]),
        (request(Layout(), node_rank=1), ["--node-rank 1: with --nodes 1 it is 0: there is one machine"]),
        (
            two_nodes(node_rank=5, rdzv_endpoint=None),
            [
                "--node-rank 5: with --nodes 2 it goes from 0 to 1",
                "--nodes 2 needs --rdzv-endpoint HOST:PORT, the address of machine 0",
            ],
        ),
    ],
)
def test_machines_that_could_not_meet_are_refused_with_all_that_is_wrong(
    asked: LaunchRequest, problems: list[str]
) -> None:
    with pytest.raises(FtError) as caught:
        TorchrunLauncher().plan_launch(asked)
    assert list(caught.value.problems) == problems
    assert caught.value.exit_code is ExitCode.LAUNCH
    assert "--node-rank k" in str(caught.value.hint)


def test_the_plan_says_what_torchrun_decides_by_itself() -> None:
    launcher = TorchrunLauncher()
    assert any("rank 0" in note and "share" in note for note in launcher.plan_launch(two_nodes(max_restarts=1)).notes)
    assert launcher.plan_launch(two_nodes()).notes == ()
    alone = launcher.plan_launch(request(Layout(procs_per_node=2), rdzv_endpoint="h:1"))
    assert any("--rdzv-endpoint h:1 is not used" in note for note in alone.notes)


def test_options_that_torchrun_would_take_from_a_forgotten_variable_are_removed() -> None:
    plan = TorchrunLauncher().plan_launch(request(Layout(procs_per_node=2)))
    assert {"PET_STANDALONE", "PET_RUN_PATH", "PYTHON_EXEC", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"} <= set(plan.unset)
    assert plan.environment == {"OMP_NUM_THREADS": "1"}


def test_the_meeting_is_read_back_from_the_command_line_and_not_from_the_scripts_arguments() -> None:
    command = ("train.py", "--rdzv-endpoint=elsewhere:1", "--node-rank=7")
    meeting = read_meeting(build_argv(two_nodes(node_rank=1, command=command)))
    assert meeting is not None
    assert (str(meeting.endpoint), meeting.node_rank, meeting.nodes, meeting.join_timeout_seconds) == (
        "gpu1:29500",
        1,
        "2",
        300,
    )
    elastic = read_meeting(build_argv(two_nodes(max_restarts=1, options=Options(join_timeout_seconds=9))))
    assert elastic is not None
    assert elastic.join_timeout_seconds == 9
    assert read_meeting(build_argv(request(Layout(procs_per_node=2), command=command))) is None
