"""Which rank failed first: the cause, not its consequences."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fleettune_core.errors import ExitCode
from fleettune_core.failures import FirstFailure, ProcessEnd, RankState, first_failure, read_rank, read_summary

SUMMARY = """Traceback (most recent call last):
  File "torch/distributed/launcher/api.py", line 300, in launch_agent
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
fleettune_core.worker FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-03-01_12:00:07
  host      : gpu8
  rank      : 3 (local_rank: 1)
  exitcode  : -15 (pid: 4243)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 4243
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-03-01_12:00:06
  host      : gpu8
  rank      : 2 (local_rank: 0)
  exitcode  : -9 (pid: 4242)  (SIGKILL)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 4242
============================================================
"""
GONE = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:1234"


def rank(k: int, stage: str = "training", failure: dict[str, Any] | None = None) -> RankState:
    record = {
        "rank": k,
        "host": f"gpu{k}",
        "pid": 100 + k,
        "world_size": 4,
        "stage": "failed" if failure else stage,
        "started_at": 0.0,
        "updated_at": 1.0,
        "failure": failure,
    }
    return read_rank(record)


def failed(k: int, at: float, kind: str, message: str = "", exit_code: int = 1, **more: Any) -> RankState:
    failure = {"at": at, "kind": kind, "message": message, "exit_code": exit_code, "mendable": kind == "FtError"}
    return rank(k, failure={**failure, **more})


def cause(*states: RankState, ends: tuple[ProcessEnd, ...] = ()) -> FirstFailure:
    found = first_failure(states, expected=range(len(states)), ends=ends)
    assert found is not None
    return found


def test_the_earliest_failure_is_the_cause() -> None:
    found = cause(failed(0, 9.0, "KeyError", "b"), failed(1, 7.0, "ValueError", "a"), rank(2))
    assert (found.rank, found.host, found.cause) == (1, "gpu1", "ValueError: a")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("RuntimeError", GONE),
        ("RuntimeError", "[..]: Connection reset by peer"),
        ("RuntimeError", "Broken pipe"),
        ("RuntimeError", "Application timeout caused pair closure"),
        ("DistBackendError", "NCCL error in: …, remote process exited or there was a network error"),
        ("DistNetworkError", "Failed to recv, got 0 bytes. Connection was likely closed."),
        ("DistStoreError", "wait timeout after 300000ms"),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
    ],
)
def test_a_rank_that_lost_its_partner_is_not_the_cause_even_when_it_noticed_first(kind: str, message: str) -> None:
    found = cause(failed(0, 5.0, kind, message), failed(1, 6.0, "ValueError", "nan"))
    assert (found.rank, found.cause) == (1, "ValueError: nan")


def test_a_lost_partner_is_told_when_nothing_else_is_known() -> None:
    done = [rank(0, stage="done")]
    found = cause(*done, failed(1, 5.0, "RuntimeError", GONE))
    assert found.rank == 1
    assert "Connection closed by peer" in found.cause


def test_a_rank_that_went_silent_is_the_cause_of_its_partners_loss() -> None:
    found = cause(failed(0, 5.0, "RuntimeError", GONE), rank(1, stage="wrapping"))
    assert (found.rank, found.cause) == (1, "ended without a word in the stage wrapping")


def test_the_launcher_knows_the_signal_that_the_rank_could_not_tell() -> None:
    found = cause(rank(0), failed(1, 5.0, "RuntimeError", GONE), rank(2), rank(3), ends=tuple(read_summary(SUMMARY)))
    assert (found.rank, found.cause) == (2, "ended without a word in the stage training: killed by SIGKILL")
    assert "out of memory" in str(found.hint)


def test_ranks_that_were_ended_because_another_failed_are_not_the_cause() -> None:
    found = cause(rank(0), failed(1, 5.0, "ValueError", "nan"), rank(2))
    assert found.rank == 1


def test_a_mistake_that_the_user_can_mend_is_told_in_its_own_words() -> None:
    found = cause(failed(0, 1.0, "FtError", "no rows", 5, hint="look here", problems=["a.jsonl:1: broken"]))
    assert found == FirstFailure(
        rank=0, host="gpu0", cause="no rows", hint="look here", problems=("a.jsonl:1: broken",), exit_code=5
    )


def test_running_out_of_gpu_memory_gets_a_hint() -> None:
    found = cause(failed(0, 1.0, "OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert "--micro-batch" in str(found.hint)
    assert found.exit_code == ExitCode.TRAINING


def test_where_all_ranks_are_done_nobody_failed() -> None:
    assert first_failure([rank(0, "done"), rank(1, "done")], expected=range(2), ends=()) is None


def test_torchruns_summary_is_read_and_any_other_log_holds_none() -> None:
    when = time.mktime((2026, 3, 1, 12, 0, 6, 0, 0, -1))
    assert read_summary(SUMMARY) == [
        ProcessEnd(rank=3, code=-15, at=when + 1),
        ProcessEnd(rank=2, code=-9, at=when, first=True),
    ]
    assert read_summary("Failures:\n nothing\n") == []
    assert read_summary("") == []


def test_of_two_lives_the_last_summary_counts() -> None:
    again = SUMMARY.replace("rank      : 2", "rank      : 0").replace("rank      : 3", "rank      : 1")
    assert [end.rank for end in read_summary(SUMMARY + again)] == [1, 0]


def test_a_rank_that_the_launcher_ended_itself_did_not_fail_first() -> None:
    ended = (ProcessEnd(rank=0, code=-15, at=5.0, first=True), ProcessEnd(rank=1, code=-11, at=5.0))
    assert cause(rank(0), rank(1), ends=ended).rank == 1
    assert cause(failed(0, 5.0, "RuntimeError", GONE), rank(1), ends=(ended[0],)).rank == 1


def test_a_rank_that_somebody_else_ended_is_told() -> None:
    found = cause(rank(0), rank(1), ends=(ProcessEnd(rank=1, code=-15, at=5.0, first=True),))
    assert (found.rank, found.cause) == (1, "ended without a word in the stage training: killed by SIGTERM")
