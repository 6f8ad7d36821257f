"""The built-in launcher `local`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fleettune_core.errors import ExitCode, FtError
from fleettune_core.launchers.local import LocalLauncher
from fleettune_core.types import DeviceKind, Devices, JobState, LaunchRequest, Layout

CPU = Devices(kind=DeviceKind.CPU, count=1, name="CPU", memory_bytes=8 << 30, bf16=False, cpu_cores=2)


def request(tmp_path: Path, **changes: object) -> LaunchRequest:
    values: dict[str, object] = {
        "run_id": "r",
        "run_dir": tmp_path / "run",
        "command": ("-m", "fleettune_core.worker", str(tmp_path / "run")),
        "python": sys.executable,
        "layout": Layout(),
        "devices": CPU,
        "options": LocalLauncher.Options(),
        "environment": {"OMP_NUM_THREADS": "2"},
        **changes,
    }
    return LaunchRequest(**values)  # type: ignore[arg-type]


def test_the_plan_is_this_interpreter_and_the_untouched_worker_command(tmp_path: Path) -> None:
    plan = LocalLauncher().plan_launch(request(tmp_path))
    assert plan.argv == (sys.executable, "-m", "fleettune_core.worker", str(tmp_path / "run"))
    assert plan.environment == {"OMP_NUM_THREADS": "2"}
    assert plan.files == ()
    assert not (tmp_path / "run").exists(), "planning touches nothing"


@pytest.mark.parametrize("layout", [Layout(procs_per_node=2), Layout(min_nodes=2, max_nodes=2), Layout(max_nodes=2)])
def test_more_than_one_process_is_refused_with_what_to_type(tmp_path: Path, layout: Layout) -> None:
    with pytest.raises(FtError, match="local starts one process") as caught:
        LocalLauncher().plan_launch(request(tmp_path, layout=layout))
    assert caught.value.exit_code is ExitCode.LAUNCH
    assert "--launcher torchrun" in str(caught.value.hint)


def test_settings_that_one_process_cannot_honour_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(FtError) as caught:
        LocalLauncher().plan_launch(request(tmp_path, node_rank=1, max_restarts=3))
    assert len(caught.value.problems) == 2
    assert caught.value.exit_code is ExitCode.LAUNCH


def test_an_endpoint_that_is_not_used_is_said_aloud(tmp_path: Path) -> None:
    plan = LocalLauncher().plan_launch(request(tmp_path, rdzv_endpoint="host:29500"))
    assert any("--rdzv-endpoint is not used" in note for note in plan.notes)


def test_no_environment_speaks_for_local() -> None:
    assert LocalLauncher().detect_environment({"RANK": "0", "PATH": "/bin"}) is None


def test_a_rank_left_over_in_the_shell_does_not_reach_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "old")
    code = "import os; print(*(os.environ.get(n) for n in ('WORLD_SIZE', 'TORCHELASTIC_RUN_ID', 'OMP_NUM_THREADS')))"
    launcher = LocalLauncher()
    job = launcher.launch(launcher.plan_launch(request(tmp_path, command=("-c", code))))
    assert job.wait(30).state is JobState.DONE
    assert job.log_files()[0].read_text() == "None None 2\n"
