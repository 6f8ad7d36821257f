"""Before several machines meet: can they? And after they could not: why, in one sentence.

The check needs no second machine. Node 0 opens the endpoint's port, connects to the endpoint as the others will, and
looks whether it arrives at itself. That tells, in seconds instead of a time-out of minutes: a port in use; an endpoint
that leads nowhere; and a second machine that claims to be node 0 as well, because from there the endpoint leads to the
real one (hiyouga/LlamaFactory#7326). It compares no host names, so an alias is as good as a name.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable

from fleettune_core.errors import ExitCode, FtError
from fleettune_launcher_torchrun.argv import Meeting

_NO_IPV6 = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})
_CONNECT_SECONDS = 5.0
_TOKEN_BYTES = 16


def check(meeting: Meeting) -> None:
    """Raise `FtError` (exit code 4) where this machine cannot do its part of the meeting."""
    addresses = _resolve(meeting)
    if meeting.node_rank == 0:
        _reach_myself(meeting, addresses)


def _resolve(meeting: Meeting) -> list[str]:
    endpoint = meeting.endpoint
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise FtError(
            f"--rdzv-endpoint {endpoint}: this machine cannot resolve the name {endpoint.host} ({error})",
            hint="give machine 0's IP address instead, the same on every machine",
            exit_code=ExitCode.LAUNCH,
        ) from error
    return sorted({str(item[4][0]) for item in found})


def _reach_myself(meeting: Meeting, addresses: list[str]) -> None:
    endpoint = meeting.endpoint
    try:
        listener = _listen(endpoint.port)
    except OSError as error:
        raise FtError(
            f"node 0 cannot listen on port {endpoint.port} of this machine: {_words(error)}",
            hint="another run, or a second node 0, has it: give --rdzv-endpoint another port on every machine,"
            " and every machine its own --node-rank",
            exit_code=ExitCode.LAUNCH,
        ) from error
    with listener:
        token = os.urandom(_TOKEN_BYTES)
        why = "what answers there is another machine"
        try:
            with socket.create_connection((endpoint.host, endpoint.port), timeout=_CONNECT_SECONDS) as out:
                out.sendall(token)
                if _arrived(listener, token):
                    return
        except OSError as error:
            why = _words(error)
    raise FtError(
        f"this machine says that it is node 0, but {endpoint} ({', '.join(addresses)}) does not lead to it: {why}",
        hint=f"--rdzv-endpoint is the address of node 0; on the other machines of {meeting.nodes} type --node-rank 1,"
        " --node-rank 2, … (RANK or NODE_RANK in the environment are not read)",
        exit_code=ExitCode.LAUNCH,
    )


def _words(error: OSError) -> str:
    # socket.create_server adds the address to strerror, and a time-out has no number.
    return os.strerror(error.errno) if error.errno else str(error) or "no answer"


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in _NO_IPV6:
                raise
    return socket.create_server(("", port))


def _arrived(listener: socket.socket, token: bytes) -> bool:
    """Whether the connection with our token comes in here. Others may knock meanwhile: machines that came early."""
    listener.settimeout(1.0)
    for _ in range(64):
        try:
            incoming, _peer = listener.accept()
        except TimeoutError:
            return False
        with incoming:
            incoming.settimeout(1.0)
            try:
                if incoming.recv(_TOKEN_BYTES, socket.MSG_WAITALL) == token:
                    return True
            except OSError:
                continue
    return False


def explainer(meeting: Meeting) -> Callable[[str], str | None]:
    """What torchrun's own words at the end of its log mean for this meeting."""
    endpoint, seconds = meeting.endpoint, meeting.join_timeout_seconds

    def explain(log: str) -> str | None:
        if "Failures:" in log and "Root Cause" in log:
            return None  # the ranks were up; their own records tell more
        if "EADDRINUSE" in log or "address already in use" in log.lower():
            return f"port {endpoint.port} of node 0 is in use; give --rdzv-endpoint another one on every machine"
        if "RendezvousClosedError" in log:
            return f"the run at {endpoint} has already ended, so this machine could not join it"
        if "RendezvousTimeoutError" in log or "waiting for clients" in log:
            return (
                f"not all of {meeting.nodes} machines came to {endpoint} within {seconds} s; start the command on"
                " each of them with its own --node-rank, or wait longer: --set launch.join_timeout_seconds=SECONDS"
            )
        if "RendezvousConnectionError" in log or "DistNetworkError" in log or "DistStoreError" in log:
            return (
                f"nothing answered at {endpoint} within {seconds} s, where node 0 should listen; is it started there"
                " with --node-rank 0, and does a firewall let the port through?"
            )
        return None

    return explain
