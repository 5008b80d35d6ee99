"""Ranks on a GPU: nccl with one rank, and two ranks that share a GPU through gloo."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing

from boxcov import FitOptions, Posterior, fit
from boxcov._torch.distributed import World, choose_backend
from boxcov.data import shapes
from boxcov.detectors.tiny import TinyCenter
from oracles.dense import relative

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def nccl(rank: int, folder: str) -> None:
    dist.init_process_group(
        choose_backend("cuda:0"), init_method=f"file://{folder}/meet", rank=0, world_size=1
    )
    there, here = (
        torch.ones(3, 3, dtype=torch.float64, device="cuda") / 3,
        torch.ones(2, dtype=torch.float64),
    )
    ranks = World(0, 2)  # two ranks, so that messages are sent
    assert ranks.all_reduce([there, here], [2**53 - 1, 0.1]) == [2**53 - 1, 0.1]
    assert bool((there == 1 / 3).all())
    assert bool((here == 1).all())
    assert ranks.gather({"a": [1]}) == [{"a": [1]}]
    dist.destroy_process_group()
    dist.init_process_group("nccl", init_method=f"file://{folder}/again", rank=0, world_size=1)
    assert ranks.all_reduce([there, here], [1.0]) == [1.0]  # CPU tensors go through the GPU
    assert ranks.gather("b") == ["b"]
    dist.destroy_process_group()


def shared(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    fit(
        TinyCenter(width=4).cuda(),
        shapes.frames(count=5),
        options=FitOptions(ekfac=True),
        distributed=True,
    ).save(f"{folder}/{rank}")
    dist.destroy_process_group()


def test_nccl_sends_the_tensors_of_a_fit(tmp_path) -> None:
    multiprocessing.spawn(nccl, (str(tmp_path),), nprocs=1)


def test_two_ranks_on_one_gpu(tmp_path) -> None:
    multiprocessing.spawn(shared, (str(tmp_path),), nprocs=2)
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()
    detector = TinyCenter(width=4).cuda()
    found, one = (
        Posterior.load(tmp_path / "0", detector),
        fit(detector, shapes.frames(count=5), options=FitOptions(ekfac=True)),
    )
    for name, block in one.blocks.items():
        assert relative(found.blocks[name].H.matrix, block.H.matrix) < 1e-4
