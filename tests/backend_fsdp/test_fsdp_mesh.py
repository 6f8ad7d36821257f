"""Which rows a rank gets follows from its place in the mesh."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from fleettune_backend_fsdp.wrapping import data_shard


@dataclass
class Mesh:
    """As much of a DeviceMesh as is looked at."""

    sizes: tuple[int, ...]
    place: tuple[int, ...]
    mesh_dim_names: tuple[str, ...]

    def size(self, axis: int) -> int:
        return self.sizes[axis]

    def get_local_rank(self, axis: int) -> int:
        return self.place[axis]


def test_every_rank_of_a_hybrid_mesh_gets_rows_of_its_own():
    names = ("replicate", "shard")
    shards = [data_shard(Mesh((3, 2), (group, rank), names)) for group in range(3) for rank in range(2)]
    assert [(shard.index, shard.count) for shard in shards] == [(index, 6) for index in range(6)]


@pytest.mark.parametrize("other", [0, 1])
def test_ranks_along_another_axis_see_the_same_rows(other):
    shard = data_shard(Mesh((2, 2), (1, other), ("shard", "sequence")))
    assert (shard.index, shard.count) == (1, 2)
