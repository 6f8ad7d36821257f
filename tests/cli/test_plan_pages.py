"""The whole page of a plan, compared with golden texts."""

from __future__ import annotations

import dataclasses
import io
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from fleettune_cli.plan_page import plan_page, shell_lines
from fleettune_cli.render_plan import plain_lines, print_plan, renderables
from fleettune_core.plan.model import Plan
from fleettune_core.types import DeviceKind, Devices, Layout, ProcessInfo

GOLDEN = Path(__file__).parent / "golden"
WIDTH = 80


def rich_text(plan: Plan, width: int, *, compact: bool = False) -> str:
    """The page as a Rich console of that width shows it, without styles."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, highlight=False, markup=False)
    for part in renderables(plan_page(plan), width, compact=compact):
        console.print(part, soft_wrap=isinstance(part, str))
    return stream.getvalue()


def check_golden(name: str, text: str) -> None:
    assert text == (GOLDEN / name).read_text(encoding="utf-8")


def test_the_plain_page_of_80_columns_is_the_golden_one(make_plan: Callable[..., Plan]) -> None:
    check_golden("plan-plain.txt", "\n".join(plain_lines(plan_page(make_plan()), WIDTH)) + "\n")


def test_the_explained_page_is_the_golden_one(make_plan: Callable[..., Plan]) -> None:
    check_golden("plan-explained.txt", "\n".join(plain_lines(plan_page(make_plan(), explain=True), WIDTH)) + "\n")


def test_the_panel_of_80_columns_is_the_golden_one(make_plan: Callable[..., Plan]) -> None:
    check_golden("plan-panel.txt", rich_text(make_plan(), WIDTH))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_nothing_of_the_page_is_cut_off(make_plan: Callable[..., Plan], width: int) -> None:
    plain = "\n".join(plain_lines(plan_page(make_plan()), width))
    panel = rich_text(make_plan(), width)
    for text in (plain, panel):
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= width
        for word in ("torchrun", "NVIDIA", "--lora-r", "--max_steps", "run.yaml:9"):
            assert word in text


def test_the_command_can_be_pasted_into_a_shell(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan()
    assert plan.launch is not None
    for width in (20, 40, 80, 200):
        pasted = "\n".join(shell_lines(plan.launch.argv, width))
        assert tuple(shlex.split(pasted.replace("\\\n", " "))) == plan.launch.argv


def test_a_plan_without_an_estimate_says_why(make_plan: Callable[..., Plan]) -> None:
    text = "\n".join(plain_lines(plan_page(make_plan(memory=None, memory_unknown="no config.json")), WIDTH))
    assert "memory       not estimated (no config.json)" in text


def test_ranks_of_a_cpu_host_share_its_memory(make_plan: Callable[..., Plan]) -> None:
    devices = Devices(kind=DeviceKind.CPU, count=1, name="a CPU", memory_bytes=10 * 2**30, bf16=False, cpu_cores=4)
    plan = make_plan(devices=devices, layout=Layout(procs_per_node=4))
    # 1181 MiB for each of 4 ranks is 46 % of 10 GiB.
    assert "1.2 GiB per rank of 10.0 GiB for 4 ranks (46 %)" in "\n".join(plain_lines(plan_page(plan), 100))


def test_a_process_that_is_a_rank_already_shows_no_command(make_plan: Callable[..., Plan]) -> None:
    process = ProcessInfo(rank=0, local_rank=0, world_size=16, local_world_size=8)
    text = "\n".join(plain_lines(plan_page(make_plan(process=process, launch=None)), WIDTH))
    assert "rank 0 of 16" in text
    assert "command" not in text


def test_a_secret_is_masked_even_in_an_explained_plan(make_plan: Callable[..., Plan]) -> None:

    plan = make_plan()
    train = dataclasses.replace(plan.config.train, extra={"service_token": "hf_abcdefghijklmnopqrstuvwxyz"})
    plan = make_plan(config=dataclasses.replace(plan.config, train=train))
    text = "\n".join(plain_lines(plan_page(plan, explain=True), WIDTH))
    assert "train.service_token = ***" in text
    assert "hf_abc" not in text


def test_a_stream_that_is_no_terminal_gets_plain_lines(make_plan: Callable[..., Plan]) -> None:
    stream = io.StringIO()
    print_plan(make_plan(), stream)
    check_golden("plan-plain.txt", stream.getvalue())
