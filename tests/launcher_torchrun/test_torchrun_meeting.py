"""Before machines meet: what cannot work is told in seconds. And after: torchrun's log in one sentence."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from fleettune_core.errors import ExitCode, FtError
from fleettune_launcher_torchrun.argv import Endpoint, Meeting
from fleettune_launcher_torchrun.meeting import check, explainer


def meeting(host: str, port: int, node_rank: int = 0) -> Meeting:
    return Meeting(endpoint=Endpoint(host=host, port=port), node_rank=node_rank, nodes="2", join_timeout_seconds=300)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_node_0_finds_itself_at_its_endpoint_and_leaves_the_port_free(host: str) -> None:
    port = free_port()
    check(meeting(host, port))
    check(meeting(host, port))
    socket.create_server(("127.0.0.1", port)).close()


def test_node_0_finds_itself_under_an_alias_that_is_not_its_host_name() -> None:
    check(meeting("127.0.0.5", free_port()))


def test_a_port_in_use_is_told_with_what_to_type() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(
            FtError, match=f"cannot listen on port {port} of this machine: Address already in use\n"
        ) as caught:
            check(meeting("127.0.0.1", port))
    assert caught.value.exit_code is ExitCode.LAUNCH
    assert "--node-rank" in str(caught.value.hint)
    assert "another port" in str(caught.value.hint)


def test_a_second_machine_that_claims_to_be_node_0_fails_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    # The real node 0 has the endpoint's port on its own address; this machine's own listener is on another one.
    import fleettune_launcher_torchrun.meeting as module

    with socket.create_server(("127.0.0.9", 0)) as real_node_0:
        port = real_node_0.getsockname()[1]
        monkeypatch.setattr(module, "_listen", lambda port: socket.create_server(("127.0.0.1", port)))
        began = time.monotonic()
        with pytest.raises(
            FtError, match=r"says that it is node 0, but 127\.0\.0\.9:\d+ .* does not lead to it"
        ) as caught:
            check(meeting("127.0.0.9", port))
    assert time.monotonic() - began < 10
    assert "--node-rank 1" in str(caught.value.hint)
    assert caught.value.exit_code is ExitCode.LAUNCH


def test_an_endpoint_where_nobody_listens_is_told_as_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import fleettune_launcher_torchrun.meeting as module

    monkeypatch.setattr(module, "_listen", lambda port: socket.create_server(("127.0.0.1", port)))
    with pytest.raises(FtError, match=r"127\.0\.0\.9.*does not lead to it: Connection refused"):
        check(meeting("127.0.0.9", free_port()))


def test_a_machine_that_knocks_early_does_not_confuse_node_0() -> None:
    port = free_port()
    stop = threading.Event()

    def knock() -> None:
        while not stop.is_set():
            try:
                socket.create_connection(("127.0.0.1", port), timeout=0.2).close()
            except OSError:
                time.sleep(0.001)

    knocker = threading.Thread(target=knock)
    knocker.start()
    try:
        for _ in range(5):
            check(meeting("127.0.0.1", port))
    finally:
        stop.set()
        knocker.join()


def test_a_name_that_does_not_resolve_is_told_on_every_machine() -> None:
    for node_rank in (0, 1):
        with pytest.raises(FtError, match=r"cannot resolve the name no-such-host\.invalid") as caught:
            check(meeting("no-such-host.invalid", 29500, node_rank))
        assert caught.value.exit_code is ExitCode.LAUNCH


def test_another_node_may_come_before_node_0_listens() -> None:
    check(meeting("127.0.0.1", free_port(), node_rank=1))


@pytest.mark.parametrize(
    ("log", "told"),
    [
        (
            "torch.distributed.DistStoreError: Timed out after 6 seconds waiting for clients. 1/2 clients joined.",
            "not all of 2 machines came to gpu1:29500 within 300 s",
        ),
        ("torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError", "not all of 2 machines came"),
        (
            "RendezvousConnectionError: The connection to the C10d store has failed. See inner exception for details.",
            "nothing answered at gpu1:29500 within 300 s, where node 0 should listen",
        ),
        ("torch.distributed.DistNetworkError: The client socket has timed out", "nothing answered at gpu1:29500"),
        (
            "RuntimeError: … port: 29500, useIpv6: 0, code: -98, name: EADDRINUSE, message: address already in use",
            "port 29500 of node 0 is in use",
        ),
        ("torch.distributed.elastic.rendezvous.api.RendezvousClosedError", "has already ended"),
        ("ModuleNotFoundError: No module named 'torch'", None),
        ("DistNetworkError\nFailures:\n  <NO_OTHER_FAILURES>\nRoot Cause (first observed failure):\n", None),
    ],
)
def test_torchruns_words_are_told_in_one_sentence(log: str, told: str | None) -> None:
    said = explainer(meeting("gpu1", 29500))(log)
    assert (said is None) if told is None else (said is not None and told in said)
