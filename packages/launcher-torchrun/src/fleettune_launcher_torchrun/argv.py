"""The command line of `torch.distributed.run`, from a launch request. Pure; it starts nothing and looks nothing up.

Three ways for processes to meet, each with its reason:

- One machine: c10d at `localhost:0`, so the port is a free one and runs side by side do not clash; this is what
  torchrun's `--standalone` does. The address is given too, because a host name need not resolve.
- A fixed number of machines, without restarts: static. It is the only one that keeps the node ranks that were typed:
  c10d numbers the machines by itself (`node_rank` "will be ignored", says torchrun), and rank 0 writes the results.
- Elastic, or with restarts: c10d, because static never notices that a machine came or went. Who hosts the store is
  decided by node rank (`is_host`), not by comparing host names (pytorch/pytorch#73656).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fleettune_core.config import setting
from fleettune_core.errors import ExitCode, FtError
from fleettune_core.types import LaunchRequest, Layout

DEFAULT_PORT = 29500
"""Port of an endpoint that names none; torchrun's own default for machines."""

MEETING_NAME = "fleettune"
"""Default rendezvous id of several machines. It cannot hold a run id, which depends on when each one was typed; one
store serves one run, so the endpoint tells runs apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of the launcher torchrun."""

    join_timeout_seconds: int = setting(
        300, "How long a machine waits for the others, in seconds, before it gives up.", at_least=1
    )
    last_call_seconds: int = setting(
        30, "How long an elastic run that has enough machines waits for more of them, in seconds.", at_least=1
    )
    local_addr: str | None = setting(
        None, "Address of this machine that the others reach. Default: its host name.", metavar="ADDRESS"
    )
    rdzv_id: str | None = setting(
        None, "Name under which the machines meet; the same on each. Default: fleettune.", metavar="NAME"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """HOST:PORT of machine 0."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where and how the machines of a run meet."""

    endpoint: Endpoint
    node_rank: int
    nodes: str
    join_timeout_seconds: int


def build_argv(request: LaunchRequest) -> tuple[str, ...]:
    """The whole command, from the interpreter to the worker's last argument, which stays as it was given."""
    layout, options = request.layout, _options(request)
    meeting = meeting_of(request)
    if meeting is None:
        address = options.local_addr or "127.0.0.1"
        how = [
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=localhost:0",
            f"--rdzv-id={_file_name(options.rdzv_id or request.run_id)}",
            f"--local-addr={address}",
        ]
    else:
        timeout = meeting.join_timeout_seconds
        if layout.elastic or request.max_restarts:
            is_host = "true" if meeting.node_rank == 0 else "false"
            # read_timeout also bounds how long a machine waits for the store to be there at all.
            conf = (
                f"is_host={is_host},join_timeout={timeout},read_timeout={timeout}"
                f",last_call_timeout={options.last_call_seconds}"
            )
            backend = "c10d"
        else:
            backend, conf = "static", f"timeout={timeout}"
        how = [
            f"--node-rank={meeting.node_rank}",
            f"--rdzv-backend={backend}",
            f"--rdzv-endpoint={meeting.endpoint}",
            f"--rdzv-id={options.rdzv_id or MEETING_NAME}",
            f"--rdzv-conf={conf}",
        ]
        if options.local_addr:
            how.append(f"--local-addr={options.local_addr}")
    return (
        request.python,
        "-m",
        "torch.distributed.run",
        f"--nnodes={_nodes(layout)}",
        f"--nproc-per-node={layout.procs_per_node}",
        *how,
        f"--max-restarts={request.max_restarts}",
        f"--log-dir={request.run_dir / 'logs' / 'torchrun'}",
        *_worker(request.command),
    )


def meeting_of(request: LaunchRequest) -> Meeting | None:
    """Where the machines meet; None for one machine.

    Raises `FtError` (exit code 4), with all that is wrong: several machines without an endpoint, an endpoint that is
    no HOST:PORT, a node rank beyond the machines.
    """
    layout = request.layout
    problems: list[str] = []
    if not 0 <= request.node_rank < layout.max_nodes:
        machines = "is 0: there is one machine" if layout.max_nodes == 1 else f"goes from 0 to {layout.max_nodes - 1}"
        problems.append(f"--node-rank {request.node_rank}: with --nodes {_nodes(layout)} it {machines}")
    endpoint = None
    if layout.max_nodes > 1:
        if request.rdzv_endpoint is None:
            problems.append(f"--nodes {_nodes(layout)} needs --rdzv-endpoint HOST:PORT, the address of machine 0")
        else:
            endpoint = parse_endpoint(request.rdzv_endpoint)
            if endpoint is None:
                problems.append(f"--rdzv-endpoint {request.rdzv_endpoint}: not of the form HOST:PORT")
    if problems:
        raise FtError(
            "torchrun cannot start this layout",
            problems=problems,
            hint="on machine k of 2: --nodes 2 --node-rank k --rdzv-endpoint HOST-OF-MACHINE-0:29500",
            exit_code=ExitCode.LAUNCH,
        )
    if endpoint is None:
        return None
    return Meeting(
        endpoint=endpoint,
        node_rank=request.node_rank,
        nodes=_nodes(layout),
        join_timeout_seconds=_options(request).join_timeout_seconds,
    )


def read_meeting(argv: tuple[str, ...]) -> Meeting | None:
    """The meeting that a planned command line describes; None for one machine.

    `launch` gets a plan and no request, and a second copy of these facts could disagree with what is started.
    """
    own = argv[: argv.index("--")]
    said = dict(word[2:].split("=", 1) for word in own if word.startswith("--") and "=" in word)
    conf = dict(pair.split("=", 1) for pair in said.get("rdzv-conf", "").split(",") if "=" in pair)
    endpoint = parse_endpoint(said["rdzv-endpoint"])
    if endpoint is None or not conf:
        return None
    return Meeting(
        endpoint=endpoint,
        node_rank=int(said["node-rank"]),
        nodes=said["nnodes"],
        join_timeout_seconds=int(conf.get("timeout") or conf["join_timeout"]),
    )


def parse_endpoint(text: str) -> Endpoint | None:
    """`host`, `host:port` or `[ipv6]:port`; None for anything else. The port is 29500 where none is given."""
    match = re.fullmatch(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[\w.-]+))(?::(?P<port>[0-9]{1,5}))?", text.strip())
    if match is None:
        return None
    port = int(match["port"]) if match["port"] else DEFAULT_PORT
    if not 1 <= port < 65536:
        return None
    return Endpoint(host=match["v6"] or match["host"], port=port)


def _worker(command: tuple[str, ...]) -> tuple[str, ...]:
    """The worker's part, behind `--`.

    Without it torchrun's parser looks for its own options among the script's as well, and refuses `--r=16` as
    ambiguous (pytorch/pytorch#120601).
    """
    if command[:1] == ("-m",):
        return ("-m", "--", *command[1:])
    return ("--", *command)


def _nodes(layout: Layout) -> str:
    return f"{layout.min_nodes}:{layout.max_nodes}" if layout.elastic else str(layout.max_nodes)


def _file_name(run_id: str) -> str:
    """A rendezvous id as part of a file name: torchrun makes a folder that begins with it."""
    return re.sub(r"[^\w.-]", "_", run_id)


def _options(request: LaunchRequest) -> Options:
    return request.options if isinstance(request.options, Options) else Options()
