"""What DeepSpeed compiles on first use is announced, compiled once, and never waited for in silence."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from fleettune_backend_deepspeed import operations
from fleettune_core.errors import ExitCode, FtError


class SlowBuilder:
    """An `OpBuilder` whose compiling takes a moment and leaves what torch leaves."""

    def __init__(self, folder: Path, name: str = "async_io") -> None:
        self.name = name
        self.source = folder / f"{name}.cpp"
        self.source.write_text("")
        self.extensions = folder / "extensions"
        self.loads = 0
        self.error: Exception | None = None

    def sources(self) -> list[str]:
        return [self.source.name]

    def deepspeed_src_path(self, code_path: str) -> str:
        return str(self.source.parent / code_path)

    def load(self, verbose: bool = False) -> None:
        self.loads += 1
        if self.error:
            raise self.error
        time.sleep(0.2)
        place = self.extensions / self.name
        (place / f"{self.name}.so").touch()
        (place / "build.ninja").write_text(f"# {self.source}\nbuild all: phony\n")


@pytest.fixture
def builder(tmp_path: Path) -> SlowBuilder:
    return SlowBuilder(tmp_path)


def built(builder: SlowBuilder) -> list[str]:
    """Build it; returns what was announced."""
    said: list[str] = []
    operations.build([builder], builder.extensions, said.append)
    return said


def test_compiling_is_announced_with_where_it_is_kept_and_when_it_is_done(builder: SlowBuilder) -> None:
    before, after = built(builder)
    assert before.startswith("compiling DeepSpeed's async_io, once (about ")
    assert before.endswith(f"; it is kept in {builder.extensions}")
    assert after == "compiled in 0 s"


def test_what_is_compiled_is_not_compiled_again_and_nothing_is_said(builder: SlowBuilder) -> None:
    built(builder)
    assert built(builder) == []
    assert builder.loads == 1


def test_other_sources_are_compiled_anew(builder: SlowBuilder, tmp_path: Path) -> None:
    built(builder)
    builder.source = tmp_path / "newer.cpp"
    builder.source.write_text("")
    assert len(built(builder)) == 2


def test_one_process_compiles_while_the_others_wait(builder: SlowBuilder) -> None:
    said: list[str] = []
    ranks = [
        threading.Thread(target=operations.build, args=([builder], builder.extensions, said.append)) for _ in range(4)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert builder.loads == 1
    assert len([line for line in said if line.startswith("compiled in")]) == 1
    assert len({line for line in said if line.startswith("compiling")}) == 1


def test_a_lock_that_one_of_us_left_when_it_was_killed_is_nobodys(builder: SlowBuilder) -> None:
    place = builder.extensions / "async_io"
    place.mkdir(parents=True)
    (place / "lock").touch()
    (place / ".fleettune").touch()
    assert built(builder)[-1].startswith("compiled in")
    assert not (place / "lock").exists()


def test_a_lock_of_somebody_else_is_told_and_waited_for(builder: SlowBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "PATIENCE_SECONDS", 0.0)
    built(builder)
    lock = builder.extensions / "async_io" / "lock"
    lock.touch()
    said: list[str] = []

    def hear(line: str) -> None:
        said.append(line)
        lock.unlink()

    operations.build([builder], builder.extensions, hear)
    assert said == [f"waiting for another program to compile; if there is none: rm {lock}"]


def test_a_compiler_that_fails_is_one_line(builder: SlowBuilder, capsys: pytest.CaptureFixture[str]) -> None:
    builder.error = RuntimeError("Error building extension 'async_io': [1/2] c++ …\nfatal error: x.h")
    with pytest.raises(FtError) as caught:
        built(builder)
    assert caught.value.exit_code == ExitCode.CONFIG
    assert caught.value.message == (
        "DeepSpeed's operation async_io could not be compiled: Error building extension 'async_io': [1/2] c++ …"
    )
    assert "fatal error: x.h" in capsys.readouterr().out
    assert not (builder.extensions / "async_io" / ".fleettune").exists()


def test_a_machine_without_a_compiler_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(FtError, match="there is no C\\+\\+ compiler no-such-compiler here") as caught:
        operations.build_async_io(print)
    assert caught.value.hint == "apt-get install g++ libaio-dev, or offload to cpu"
