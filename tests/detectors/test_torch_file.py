"""Files of ``torch.save``: what is read, and small files that would exhaust memory or time."""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections import OrderedDict
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from boxcov import BoxcovError
from boxcov.detectors.torch_file import Foreign, read_torch_file
from boxcov.detectors.weight_file import read_weights
from helpers.pickles import HUGE_PICKLES, rebuilt, text, torch_zip


def content() -> dict[str, Any]:
    whole = torch.randn(6, 4)
    return {
        "state_dict": OrderedDict(
            whole=whole,
            part=whole[1:3, ::2],
            transposed=whole.T,
            parameter=torch.nn.Parameter(torch.randn(3)),
            scalar=torch.tensor(7),
            flags=torch.tensor([True, False]),
            half=torch.randn(5).half(),
            bfloat=torch.randn(5).bfloat16(),
            double=torch.randn(2).double(),
            nothing=torch.zeros(0, 3),
        ),
        "meta": {"version": "1.1", "classes": ("car", "bus"), "seed": 3, "lr": [1e-3, None, True]},
        "score": np.float64(0.25),
        "array": np.arange(3),
        "when": torch.device("cpu"),
    }


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_tensors_are_those_of_torch_load(tmp_path, new, protocol) -> None:
    torch.manual_seed(0)
    saved = content()
    torch.save(
        saved, tmp_path / "x.pth", pickle_protocol=protocol, _use_new_zipfile_serialization=new
    )
    found = read_torch_file(tmp_path / "x.pth")
    assert list(found) == list(saved)
    assert list(found["state_dict"]) == list(saved["state_dict"])
    for name, tensor in saved["state_dict"].items():
        assert found["state_dict"][name].dtype == tensor.dtype
        assert torch.equal(found["state_dict"][name], tensor), name
    assert found["meta"] == saved["meta"]
    assert isinstance(found["score"], Foreign)


def test_a_state_dict_with_attributes_and_hooks(tmp_path) -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    optimiser = torch.optim.AdamW(net.parameters())
    net(torch.zeros(1, 3, 5, 5)).sum().backward()
    optimiser.step()
    torch.save({"model": net.state_dict(), "optimizer": optimiser.state_dict()}, tmp_path / "x.pth")
    state, _ = read_weights(tmp_path / "x.pth")
    assert all(torch.equal(state[name], tensor) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize("name", sorted(HUGE_PICKLES))
def test_small_files_with_huge_claims_are_refused(tmp_path, name) -> None:
    """Each of them takes gigabytes or minutes where it is unpickled."""
    path = torch_zip(tmp_path / "x.pth", HUGE_PICKLES[name], {"0": b""})
    with pytest.raises(BoxcovError, match=r"x\.pth: "):
        read_weights(path)


def test_entries_that_many_dicts_share_are_copied_once(tmp_path) -> None:
    """Five thousand dicts of twenty thousand entries, in 280 kB, would fill 2 GB."""
    entries = b"".join(text(str(i)) + b"K\x01\x86" for i in range(500))
    shared = b"]q\x00(" + entries + b"e" + b"ccollections\nOrderedDict\nq\x01"
    path = torch_zip(
        tmp_path / "x.pth", b"\x80\x02(" + shared + b"h\x01h\x00\x85R" * 400 + b"t.", {}
    )
    assert sum(len(made) for made in read_torch_file(path) if isinstance(made, dict)) == 500


def test_an_early_file_with_a_tuple_as_a_name_is_refused(tmp_path) -> None:
    """The hash of the tuple would take for ever."""
    head = [pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {}, {})]
    names = HUGE_PICKLES["hash of nested tuples"].split(b"}")[-1].removesuffix(b"K\x01ss.")
    (tmp_path / "x.pth").write_bytes(b"".join(head) + b"\x80\x02](" + names + b"e.")
    with pytest.raises(BoxcovError, match=r"x\.pth: .*a tuple instead of a name"):
        read_weights(tmp_path / "x.pth")


def test_compressed_records_are_refused(tmp_path) -> None:
    path = torch_zip(
        tmp_path / "x.pth",
        rebuilt(numel=1 << 26, size=(1 << 26,)),
        {"0": bytes(1 << 28)},
        zipfile.ZIP_DEFLATED,
    )
    assert path.stat().st_size < 1 << 20
    with pytest.raises(BoxcovError, match=r"x\.pth: .*compressed, .*safetensors"):
        read_weights(path)


def test_records_that_overlap_are_refused(tmp_path) -> None:
    path = torch_zip(tmp_path / "x.pth", rebuilt(numel=4, size=(4,)), {"0": bytes(16)})
    with zipfile.ZipFile(path) as archive:
        one = archive.getinfo("archive/data/0")
    data = path.read_bytes()
    start = data.index(b"PK\x01\x02", one.header_offset)
    end = data.rindex(b"PK\x05\x06")
    copies = data[start:end] * 1000
    tail = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 2000, 2000, len(copies), start, 0)
    path.write_bytes(data[:start] + copies + tail)
    with pytest.raises(BoxcovError, match=r"x\.pth: "):
        read_weights(path)


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ({"numel": 10**12, "size": (2, 2)}, "a storage of 1000000000000 numbers has 16 bytes"),
        ({"size": (10**9, 1), "stride": (0, 1)}, "with 4 numbers"),
        ({"size": (10**9, 0, 1, 1), "stride": (1, 1, 1, 1)}, "holds no numbers"),
        ({"offset": 3}, "not a checkpoint"),
        ({"offset": -1}, "a tensor of shape"),
        ({"stride": (2**61, 1)}, "a tensor of shape"),
    ],
)
def test_lying_sizes_of_tensors_are_refused(tmp_path, claims, message) -> None:
    for read in (torch_zip, legacy):
        path = read(tmp_path / "x.pth", rebuilt(**claims), {"0": bytes(16)})
        with pytest.raises(BoxcovError, match=rf"x\.pth: .*{message}|has another size"):
            read_weights(path)


def legacy(path: Path, code: bytes, storages: dict[str, bytes]) -> Path:
    """Write the format before torch 1.6."""
    out = BytesIO()
    for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}):
        out.write(pickle.dumps(value, 2))
    out.write(code)
    out.write(pickle.dumps(list(storages), 2))
    for data in storages.values():
        out.write(struct.pack("<q", len(data) // 4) + data)
    path.write_bytes(out.getvalue())
    return path


def test_both_formats_of_the_helpers_are_read(tmp_path) -> None:
    for write in (torch_zip, legacy):
        path = write(tmp_path / "x.pth", rebuilt(), {"0": struct.pack("<4f", 1, 2, 3, 4)})
        assert read_weights(path)[0]["x"].tolist() == [[1, 2], [3, 4]]


def test_an_empty_tensor_of_safetensors_is_refused(tmp_path) -> None:
    from safetensors.torch import save_file

    save_file({"head.cls_preds.0.weight": torch.zeros(10**9, 0, 1, 1)}, tmp_path / "x.safetensors")
    with pytest.raises(BoxcovError, match=r"x\.safetensors: .* holds no numbers"):
        read_weights(tmp_path / "x.safetensors")


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.st", "weights"])
def test_safetensors_files_are_read_under_any_name(tmp_path, name) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / name, {"key": "text"})
    state, meta = read_weights(tmp_path / name)
    assert state["a"].tolist() == [1, 1]
    assert meta == {"key": "text"}


def test_what_only_begins_like_safetensors_is_no_checkpoint(tmp_path) -> None:
    for content in (b"", b"{", struct.pack("<Q", 99) + b"{}", struct.pack("<Q", 2) + b"{x" + b"0"):
        (tmp_path / "w").write_bytes(content)
        with pytest.raises(BoxcovError):
            read_weights(tmp_path / "w")
