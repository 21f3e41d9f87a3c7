"""Groups of one and of many processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from pool import Pool

from hybrid.config import HybridConfig
from hybrid.mesh import open_mesh


def test_one_process_needs_no_launcher():
    mesh = open_mesh(HybridConfig())
    assert (mesh.rank, mesh.world_size, mesh.device.type) == (0, 1, "cuda" if torch.cuda.is_available() else "cpu")
    assert mesh.table([3, 0.5]) == [[3.0, 0.5]]
    assert open_mesh(HybridConfig()).world_size == 1  # again: the group is there


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_is_refused_where_there_is_none():
    with pytest.raises(ValueError, match="no CUDA device"):
        open_mesh(HybridConfig(device="cuda"))


def agreements(stage: int) -> tuple:
    mesh = open_mesh(HybridConfig(zero_stage=stage))
    mine = [mesh.rank, 10.0 * mesh.rank]
    return mesh.sum(mine), mesh.min(mine), mesh.max(mine), mesh.table(mine), mesh.device_mesh.shape, mesh.shard_rank


def test_ranks_agree(pool2):
    for rank, result in enumerate(pool2.run(agreements, 3)):
        assert result == ([1, 10], [0, 0], [1, 10], [[0, 0], [1, 10]], (1, 2), rank)
    for result in pool2.run(agreements, 0):
        assert result[4:] == ((2, 1), 0)  # replicas: everyone holds the one shard


def waits() -> str:
    """Rank 0 waits for a rank that does not come."""
    open_mesh(HybridConfig(device="cpu", timeout_s=2))
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["done"])
        return ""
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return str(error)
    finally:
        store.set("done", "1")
    return "no error"


def test_the_timeout_holds_in_a_group_that_exists_already():
    pool = Pool(2)  # its own: the group is broken afterwards
    try:
        assert "Timed out waiting 2000ms" in pool.run(waits)[0]
    finally:
        pool.close()


def many_meshes() -> tuple[int, int]:
    groups = []
    for stage in (0, 3) * 4:
        open_mesh(HybridConfig(device="cpu", zero_stage=stage))
        groups.append(len(dist.distributed_c10d._world.pg_map))
    return groups[1], groups[-1]


def test_engines_of_one_layout_share_their_groups(pool2):
    for after_one_of_each, at_the_end in pool2.run(many_meshes):
        assert after_one_of_each == at_the_end
