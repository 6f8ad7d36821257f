"""The first host of SLURM's short form."""

from __future__ import annotations

import pytest

from fleettune_launcher_slurm.hostlist import first_host


@pytest.mark.parametrize(
    ("expression", "host"),
    [
        ("gpu7", "gpu7"),
        ("node[003-005,9]", "node003"),
        ("node[003]", "node003"),
        ("nodeA,nodeB[001,003]", "nodeA"),
        ("nodeB[001,003],nodeA", "nodeB001"),
        ("rack[1-2]-gpu[09-10].example.org", "rack1-gpu09.example.org"),
        ("a-1-2,b", "a-1-2"),
        ("", None),
        ("node[003", None),
        ("node[", None),
        (",a", None),
    ],
)
def test_the_first_host_of_an_expression(expression: str, host: str | None) -> None:
    assert first_host(expression) == host
