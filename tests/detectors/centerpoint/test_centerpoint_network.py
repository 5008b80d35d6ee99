"""Sizes of the networks, and the encoders against slow implementations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import boxcov
from boxcov.detectors.centerpoint import CenterPoint, Config
from boxcov.detectors.centerpoint.config import Dense, Pillars, Reporting
from boxcov.detectors.centerpoint.voxel_encoder import (
    Sites,
    SparseConv,
    cell_number,
    index_table,
    strided_sites,
)
from boxcov.detectors.centerpoint.voxels import VoxelGrid, voxelise
from boxcov.posterior.kronecker_block import Eigendecomposition
from helpers.centerpoint_cases import (
    cloud,
    detector_of,
    frames,
    pillar_config,
    slow_pillars,
    voxel_config,
)


def count(module):
    return sum(p.numel() for p in module.parameters())


def test_parameter_counts():
    pillar, voxel = CenterPoint(Config.pillar()), CenterPoint(Config.voxel())
    assert count(pillar) == 5_982_854
    assert {name: count(part) for name, part in pillar.parts().items()} == {
        "head": 1_593_414,
        "neck": 180_992,
        "backbone": 4_207_616,
        "encoder": 832,
    }
    assert count(voxel) == 8_938_262
    assert {name: count(part) for name, part in voxel.parts().items()} == {
        "head": 1_667_142,
        "neck": 295_936,
        "backbone": 4_280_832,
        "encoder": 2_694_352,
    }
    # det3d and OpenPCDet have 2,368 biases before norms in the head besides, which are folded away
    assert count(CenterPoint(Config.pillar("det3d"))) == 5_988_998 - 2_368
    assert count(CenterPoint(Config.pillar("openpcdet"))) == 5_989_030 - 2_368
    assert count(CenterPoint(Config.small())) <= 2_000_000
    assert CenterPoint(Config.kitti()).box_fields == ("x", "y", "z", "w", "l", "h", "yaw")


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (Config.pillar(), {"head": 137.27, "backbone": 137.27 + 4.50 + 139.89}),
        (Config.voxel(), {"head": 172.70, "encoder": 172.70 + 4.56 + 153.75 + 258.11}),
    ],
    ids=["pillar", "voxel"],
)
def test_storage_of_the_factors(config, sizes, monkeypatch):
    """The sizes of the factors do not depend on the map, so a few metres are enough."""
    # computing the eigenvectors of an identity matrix of side 4608 takes half a minute
    monkeypatch.setattr(
        Eigendecomposition,
        "of",
        lambda matrix, dtype: Eigendecomposition(
            matrix.to(dtype), matrix.new_ones(matrix.shape[:2], dtype=dtype)
        ),
    )
    small = replace(config, point_range=(-3.2, -3.2, -5.0, 3.2, 3.2, 3.0))
    detector = CenterPoint(small).eval()
    for depth, mib in sizes.items():
        posterior = boxcov.fit(
            detector, [([cloud(small)], None)], depth=depth, prior_precision=1.0, fisher="identity"
        )
        assert posterior.storage().factors / 2**20 == pytest.approx(mib, abs=0.02)


ENCODERS = {
    "mmdet3d": Pillars(widths=(8,), max_points=4),
    "det3d": Pillars(widths=(8, 8), centre_z=False, max_points=4),
    "openpcdet": Pillars((8, 8), padded=False, max_points=None, max_cells=None, any_height=True),
    "few pillars": Pillars(widths=(8,), max_points=2, max_cells=(10, 20)),
}


@pytest.mark.filterwarnings("ignore:a frame has more than 20 occupied cells")
@pytest.mark.parametrize("encoder", ENCODERS.values(), ids=ENCODERS)
def test_the_pillar_encoder_is_the_slow_one(encoder):
    config = pillar_config(
        encoder=encoder, voxel_size=(0.8, 0.8, 8.0), dense=Dense((4,), (1,), (2,), (4,), (1,), 6, 5)
    )
    detector = detector_of(config, dtype=torch.float64)
    clouds = [cloud(config, seed, 300).double() for seed in range(2)]
    with torch.no_grad():
        torch.testing.assert_close(
            detector.encoder(clouds), slow_pillars(config, detector.encoder.layers, clouds)
        )


def test_a_padded_slot_takes_part_in_the_maximum():
    """A pillar with room holds relu(BN(0)); a full one does not, nor does one of OpenPCDet's."""
    point = torch.tensor([[0.1, 0.1, 0.0, 0.0, 0.0]])
    outs = []
    for encoder in (
        Pillars(widths=(8,), max_points=2),
        Pillars(widths=(8,), max_points=1),
        Pillars(widths=(8,), padded=False),
    ):
        detector = detector_of(pillar_config(encoder=encoder))
        norm = detector.encoder.layers[0].norm
        zero = norm(torch.zeros(1, 8)).relu()[0]
        with torch.no_grad():
            detector.encoder.layers[0].linear.weight.zero_()
            outs.append(detector.encoder([point])[0].amax((1, 2)))
            norm.bias -= 100
            detector.encoder.layers[0].linear.weight.fill_(1.0)
        assert torch.allclose(outs[-1], zero)
    detector = detector_of(pillar_config(encoder=Pillars(widths=(8,), max_points=2)))
    alone = detector.encoder([point])[0].amax((1, 2))
    assert bool(
        (alone >= detector.encoder.layers[0].norm(torch.zeros(1, 8)).relu()[0] - 1e-6).all()
    )


@pytest.mark.filterwarnings("ignore:a frame has more than")
@pytest.mark.parametrize("limits", [(None, None), (2, None), (None, 5), (3, 7)])
def test_first_come_first_served(limits):
    max_points, max_cells = limits
    generator = torch.Generator().manual_seed(0)
    clouds = [
        torch.cat(
            [3 * torch.rand(60, 3, generator=generator), torch.rand(60, 2, generator=generator)], 1
        )
        for _ in range(2)
    ]
    cells = voxelise(
        clouds, VoxelGrid((0, 0, 0, 3, 3, 3), (1, 1, 1), (3, 3, 3), max_points, max_cells)
    )
    expected = {}
    for b, points in enumerate(clouds):
        mine = {}
        for point in points:
            key = (b, *(int(point[i]) for i in (2, 1, 0)))
            if key not in mine and max_cells is not None and len(mine) >= max_cells:
                continue
            held = mine.setdefault(key, [])
            if max_points is None or len(held) < max_points:
                held.append(point)
        expected.update(mine)
    assert [tuple(w) for w in cells.position.tolist()] == sorted(expected)
    for i, where in enumerate(cells.position.tolist()):
        assert torch.equal(cells.points[cells.cell == i], torch.stack(expected[tuple(where)]))
    assert torch.equal(cells.counts, torch.bincount(cells.cell))


def test_openpcdets_pillars_take_points_of_any_height():
    points = torch.zeros(3, 5)
    points[:, 2] = torch.tensor([-40.0, 0.0, 40.0])
    points[:, :2] = 0.1
    networks = (Config.pillar("openpcdet"), Config.pillar(), Config.voxel(0.1, "openpcdet"))
    grids = [config.voxel_grid(training=False) for config in networks]
    assert [int(voxelise([points], grid).counts.sum()) for grid in grids] == [3, 1, 1]
    points[0, 2] = torch.nan
    assert int(voxelise([points], grids[0]).counts.sum()) == 2


def sweeps_of(count):
    """A cloud of two sweeps with ``count`` points each, every point in a voxel of its own."""
    points = torch.zeros(2 * count, 5)
    points[:, 0] = 0.05 + 0.1 * torch.arange(2 * count)
    points[count:, 4] = 0.5  # the age of the second sweep
    return points


def test_openpcdet_shuffles_before_its_limit():
    grid = VoxelGrid((0, 0, -1, 20, 1, 1), (0.1, 1, 2), (200, 1, 1), 10, 100)
    with pytest.warns(boxcov.BoxcovWarning, match="more than 100 occupied cells, the limit"):
        in_order = voxelise([sweeps_of(100)], grid).points
    with pytest.warns(boxcov.BoxcovWarning, match="more than 100 occupied cells"):
        shuffled = voxelise([sweeps_of(100)] * 2, replace(grid, shuffled=True))
    assert int((in_order[:, 4] > 0).sum()) == 0  # only the newest sweep
    assert 30 < int((shuffled.points[:100, 4] > 0).sum()) < 70
    # the order is fixed: frames of a batch are as frames of their own
    assert torch.equal(shuffled.points[:100], shuffled.points[100:])
    assert Config.voxel(0.1, "openpcdet").voxel_grid(training=False).shuffled
    assert not Config.voxel(0.1, "mmdet3d").voxel_grid(training=False).shuffled


def test_a_limit_that_is_not_hit_gives_no_warning():
    grid = VoxelGrid((0, 0, -1, 20, 1, 1), (0.1, 1, 2), (200, 1, 1), 10, 200)
    assert len(voxelise([sweeps_of(100)] * 2, grid).points) == 400  # two frames, 200 cells each


def test_points_that_are_no_numbers_are_nowhere():
    bad = torch.tensor([torch.nan, torch.inf, torch.nan, torch.nan, torch.inf])
    points = torch.full((6, 5), 0.5)
    points[:5].diagonal().copy_(bad)  # each number of a point, the intensity and the age too
    assert len(voxelise([points], VoxelGrid((0, 0, 0, 1, 1, 1), (1, 1, 1), (1, 1, 1))).points) == 1


@pytest.mark.parametrize("column", [3, 4])
def test_a_column_without_numbers_is_warned_of(column: int) -> None:
    grid = VoxelGrid((0, 0, 0, 1, 1, 1), (1, 1, 1), (1, 1, 1))
    points = torch.full((6, 5), 0.5)
    points[:, column] = torch.nan
    with pytest.warns(boxcov.BoxcovWarning, match="every point .* NaN or infinite intensity or"):
        assert not len(voxelise([points], grid).points)
    points[:, 0] = 7.0  # out of range
    assert not len(voxelise([points], grid).points)


# the sparse encoder against dense convolutions


def grid_of(x, where, shape, frames=2):
    out = x.new_zeros(frames, x.shape[1], *shape)
    out[where[:, 0], :, where[:, 1], where[:, 2], where[:, 3]] = x
    return out


def as_kernel(conv):
    return conv.weight.reshape(conv.n_out, *conv.kernel, conv.n_in).permute(0, 4, 1, 2, 3)


def some_sites(shape, share=0.15, seed=0):
    generator = torch.Generator().manual_seed(seed)
    where = (torch.rand(2, *shape, generator=generator) < share).nonzero()
    x = torch.randn(len(where), 3, generator=generator, dtype=torch.float64)
    return Sites(cell_number(*where.unbind(1), shape), shape, frames=2), x


def test_a_submanifold_convolution_is_a_dense_one_at_its_sites():
    sites, x = some_sites((5, 6, 7))
    conv = SparseConv(3, 4, (3, 3, 3)).double()
    found = conv(x, index_table(sites, sites, (3, 3, 3), (1, 1, 1), (1, 1, 1)))
    dense = F.conv3d(grid_of(x, sites.cells, sites.shape), as_kernel(conv), padding=1)
    torch.testing.assert_close(
        found, dense[sites.cells[:, 0], :, sites.cells[:, 1], sites.cells[:, 2], sites.cells[:, 3]]
    )


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "shape"),
    [
        ((3, 3, 3), (2, 2, 2), (1, 1, 1), (5, 6, 7)),
        ((3, 3, 3), (2, 2, 2), (0, 1, 1), (11, 8, 8)),
        ((3, 1, 1), (2, 1, 1), (0, 0, 0), (5, 4, 4)),
    ],
)
def test_a_strided_sparse_convolution_equals_the_dense_one(kernel, stride, padding, shape):
    sites, x = some_sites(shape, share=0.05)
    conv = SparseConv(3, 4, kernel).double()
    out, count = strided_sites(sites, kernel, stride, padding)
    assert count == len(out.numbers)
    found = grid_of(conv(x, index_table(sites, out, kernel, stride, padding)), out.cells, out.shape)
    dense = F.conv3d(
        grid_of(x, sites.cells, shape), as_kernel(conv), stride=stride, padding=padding
    )
    torch.testing.assert_close(found, dense)
    touched = F.conv3d(
        grid_of(torch.ones(len(x), 1), sites.cells, shape),
        torch.ones(1, 1, *kernel),
        stride=stride,
        padding=padding,
    )
    assert [tuple(w) for w in out.cells.tolist()] == [
        tuple(w) for w in (touched[:, 0] > 0).nonzero().tolist()
    ]


def dense_encoder(encoder, clouds):
    """The whole sparse encoder with dense convolutions, masked to the sites after every layer."""
    config = encoder.config
    cells = voxelise(clouds, replace(config.voxel_grid(training=False), max_cells=None))
    mean = torch.stack([cells.points[cells.cell == i].mean(0) for i in range(len(cells.counts))])
    nx, ny, nz = config.grid
    x = grid_of(mean, cells.position, (nz + 1, ny, nx))
    mask = grid_of(torch.ones(len(mean), 1, dtype=torch.float64), cells.position, (nz + 1, ny, nx))

    def norm(layer, x):
        return F.batch_norm(
            x, layer.running_mean, layer.running_var, layer.weight, layer.bias, eps=layer.eps
        )

    for stage in encoder.stages:
        if stage.stride != (1, 1, 1):
            mask = (
                F.conv3d(
                    mask,
                    mask.new_ones(1, 1, *stage.kernel),
                    stride=stage.stride,
                    padding=stage.padding,
                )
                > 0
            ).double()
        x = F.conv3d(x, as_kernel(stage.conv), stride=stage.stride, padding=stage.padding)
        x = norm(stage.norm, x).relu() * mask
        for block in stage.blocks:
            out = norm(block.norm1, F.conv3d(x, as_kernel(block.conv1), padding=1)).relu() * mask
            out = norm(block.norm2, F.conv3d(out, as_kernel(block.conv2), padding=1)) + x
            x = out.relu() * mask
    return torch.cat(
        [x[:, c, d].unsqueeze(1) for c in range(x.shape[1]) for d in range(x.shape[2])], 1
    )


def test_the_voxel_encoder_is_the_dense_one():
    config = voxel_config(voxel_size=(0.4, 0.4, 0.2))
    detector = detector_of(config, dtype=torch.float64)
    clouds = [cloud(config, seed, 150).double() for seed in range(2)]
    with torch.no_grad():
        torch.testing.assert_close(
            detector.encoder(clouds), dense_encoder(detector.encoder, clouds)
        )


def test_chunks_of_patches_give_the_same_numbers_and_factors(monkeypatch):
    config = voxel_config()
    detector = detector_of(config)
    data = frames(config, 1)
    whole = boxcov.fit(detector, data, depth=["encoder"], prior_precision=1.0)
    boxes = detector.detect(data[0][0]).boxes
    monkeypatch.setattr("boxcov.detectors.centerpoint.voxel_encoder._PATCH_ELEMENTS", 5000)
    parts = boxcov.fit(detector, data, depth=["encoder"], prior_precision=1.0)
    torch.testing.assert_close(detector.detect(data[0][0]).boxes, boxes, rtol=1e-4, atol=1e-5)
    for name, block in whole.blocks.items():
        torch.testing.assert_close(
            parts.blocks[name].Q.values, block.Q.values, rtol=1e-3, atol=1e-5
        )
        torch.testing.assert_close(
            parts.blocks[name].H.values, block.H.values, rtol=1e-3, atol=1e-5
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dense": Dense(widths=(4, 6))}, "must have one length"),
        ({"dense": Dense(up_strides=(1, 1, 2))}, "maps differ in size"),
        ({"dense": Dense(up_strides=(0, 1, 2))}, r"no .* up_strides \(\(0, 1, 2\)\) may be 0"),
        ({"voxel_size": (0.0, 0.2, 8.0)}, r"no voxel_size \(\(0.0, 0.2, 8.0\)\)"),
        ({"voxel_size": (0.3, 0.3, 8.0)}, "not divisible by the stride 8"),
        ({"reporting": Reporting(nms="circle"), "tasks": (("car",),)}, "1 tasks, but 6 radii"),
    ],
)
def test_configs_that_fit_no_network(change, message):
    with pytest.raises(boxcov.BoxcovError, match=message):
        replace(Config.pillar(), **change)


def test_the_seed_decides_the_weights_and_no_global_state():
    state = torch.get_rng_state()
    one, two, other = (CenterPoint(pillar_config(), seed=s) for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.head.shared[0].weight, two.head.shared[0].weight)
    assert not torch.equal(one.head.shared[0].weight, other.head.shared[0].weight)
