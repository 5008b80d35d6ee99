from __future__ import annotations

import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
from torch import multiprocessing
from torch.distributed.distributed_c10d import BackendConfig

from boxcov import BoxcovError, Posterior, fit
from boxcov._torch.distributed import World, _local_gpu, choose_backend, transfer_device
from boxcov.data import shapes
from boxcov.detectors.tiny import TinyCenter
from helpers.command_line import small_network, succeed
from helpers.rank_cases import CASES, posterior_of, work
from oracles.dense import relative


@pytest.mark.parametrize("count", [1, 2, 3])
def test_several_ranks_give_the_posterior_of_one(count, tmp_path) -> None:
    multiprocessing.spawn(work, (count, str(tmp_path)), nprocs=count)
    detector = TinyCenter(width=4)
    expected = {case: posterior_of(case) for case in CASES}
    five = fit(detector, shapes.frames(count=5))
    for case, one in {**expected, "stream": five, "resumed": five}.items():
        written = [(tmp_path / f"{case}.{rank}").read_bytes() for rank in range(count)]
        assert all(each == written[0] for each in written), case  # every rank has the same
        found = Posterior.load(tmp_path / f"{case}.0", detector)
        assert (found.frames, found.n_data, found.skipped) == (
            one.frames,
            one.n_data,
            one.skipped,
        ), case
        assert found.loss == pytest.approx(one.loss, rel=1e-12), case
        assert list(found.blocks) == list(one.blocks), case
        for name, block in one.blocks.items():
            assert relative(found.blocks[name].Q.matrix, block.Q.matrix) < 1e-6, (case, name)
            assert relative(found.blocks[name].H.matrix, block.H.matrix) < 1e-6, (case, name)
            # the eigenbasis is not unique where eigenvalues are equal, but their sum is
            if block.ekfac_eigenvalues is not None:
                assert float(found.blocks[name].ekfac_eigenvalues.sum()) == pytest.approx(
                    float(block.ekfac_eigenvalues.sum()), rel=1e-5
                ), (case, name)
        assert len({id(block.Q) for block in found.blocks.values()}) == len(
            {id(block.Q) for block in one.blocks.values()}
        )
    for rank in range(count):
        start = "" if count == 1 else f"rank {rank} of {count}: "
        assert (
            (tmp_path / f"error.{rank}")
            .read_text()
            .startswith(f"{start}the targets of item {rank} do not fit the detector")
        )


def test_a_fit_over_ranks_needs_a_process_group() -> None:
    with pytest.raises(
        BoxcovError, match=r"no process group: call torch\.distributed\.init_process_group first"
    ):
        fit(TinyCenter(), shapes.frames(count=1), distributed=True)


def test_items_are_assigned_round_robin() -> None:
    for count in (1, 2, 3, 8):
        owners = [
            [rank for rank in range(count) if World(rank, count).owns(number)]
            for number in range(10)
        ]
        assert all(len(owner) == 1 for owner in owners)
        for end in range(11):
            assert sum(World(rank, count).count_items(end) for rank in range(count)) == end


@pytest.mark.parametrize(
    ("device", "config", "expected"),
    [
        ("cpu", "cpu:gloo,cuda:gloo", "cpu"),  # torch's name for "gloo"
        ("cpu", "cpu:gloo,cuda:nccl", "cpu"),  # the choice of choose_backend for GPUs
        ("cuda:1", "cpu:gloo,cuda:nccl", "cuda:1"),
        ("cuda:1", "cuda:nccl", "cuda:1"),  # torch's name for "nccl"
        ("cuda:1", "cpu:gloo,cuda:gloo", "cpu"),
        ("cuda:1", "cpu:mpi,cuda:mpi", "cuda:1"),
        ("mps", "cpu:gloo,cuda:gloo", "cpu"),
    ],
)
def test_transfer_device_is_one_of_the_backend(device, config, expected) -> None:
    assert transfer_device(torch.device(device), config) == torch.device(expected)


def test_nccl_sends_cpu_tensors_through_the_gpu() -> None:
    with mock.patch.object(torch.cuda, "current_device", return_value=2):
        assert transfer_device(torch.device("cpu"), "cuda:nccl") == torch.device("cuda:2")
    with pytest.raises(BoxcovError, match="sends neither CPU nor GPU tensors"):
        transfer_device(torch.device("cpu"), "xpu:ccl")


def test_backends_are_valid_for_torch() -> None:
    assert str(BackendConfig(choose_backend("cpu"))) == "cpu:gloo,cuda:gloo"
    assert str(BackendConfig(choose_backend("cuda:0"))) == "cpu:gloo,cuda:nccl"


def test_each_process_has_its_own_gpu() -> None:
    assert _local_gpu("cuda", 1, 2) == "cuda:1"
    with pytest.raises(
        BoxcovError,
        match="process 2 of this machine has no GPU, there are 2: lower --nproc-per-node",
    ):
        _local_gpu("cuda", 2, 2)
    with pytest.raises(BoxcovError, match="device 'cuda:0' under torchrun: give cuda"):
        _local_gpu("cuda:0", 0, 2)


@pytest.mark.slow
def test_torchrun(tmp_path) -> None:
    """The command line in three processes, also when bad data end one of them."""
    word, out = small_network(tmp_path), tmp_path / "p.safetensors"
    words = ["--detector", word, "--count", "4", "--sweeps", "1", "--fisher", "mc"]
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=3",
        "-m",
        "boxcov",
        "fit",
    ]
    done = subprocess.run(
        [*launch, *words, "--out", str(out)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written to") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net0.safetensors", "p.safetensors"]
    succeed("fit", *words, "--out", tmp_path / "one")
    from boxcov.pipeline.detectors import load_detector

    found, one = (Posterior.load(path, load_detector(word)) for path in (out, tmp_path / "one"))
    for name, block in one.blocks.items():
        assert relative(found.blocks[name].H.matrix, block.H.matrix) < 1e-6
    refused = subprocess.run(
        [*launch, *words, "--out", str(tmp_path / "x"), "--depth", "hed"],
        capture_output=True,
        text=True,
    )
    assert refused.returncode != 0
    assert "depth 'hed' is not a part of this detector" in refused.stderr
