"""The control process stays light, and no two modules import each other."""

from __future__ import annotations

import subprocess
import sys

import grimp
import pytest

PACKAGES = (
    "fleettune_core",
    "fleettune_cli",
    "fleettune_launcher_torchrun",
    "fleettune_launcher_slurm",
    "fleettune_backend_fsdp",
    "fleettune_backend_deepspeed",
)
HEAVY = ("torch", "transformers", "trl", "accelerate", "peft", "datasets", "deepspeed", "numpy", "pyarrow", "pandas")
# What `ft` may import before it launches anything.
CONTROL = (
    "fleettune_core",
    "fleettune_core.hookspecs",
    "fleettune_core.config.load",
    "fleettune_core.plugins.catalog",
    "fleettune_core.plugins.relay",
    "fleettune_core.plan.solve",
    "fleettune_core.data.peek",
    "fleettune_core.launchers.local",
    "fleettune_core.backends.ddp",
    "fleettune_core.run",
    "fleettune_core.worker",
    "fleettune_cli.main",
    "fleettune_launcher_torchrun",
    "fleettune_launcher_slurm",
    "fleettune_backend_fsdp",
    "fleettune_backend_deepspeed",
)


@pytest.mark.parametrize("module", CONTROL)
def test_importing_a_control_module_brings_nothing_heavy(module):
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_there_is_no_circle_of_imports():
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
    circles = []
    for module in sorted(graph.modules):
        for imported in graph.find_modules_directly_imported_by(module):
            chain = graph.find_shortest_chain(importer=imported, imported=module)
            if chain and not imported.startswith(f"{module}.") and not module.startswith(f"{imported}."):
                circles.append(" -> ".join((module, *chain)))
    assert not circles
