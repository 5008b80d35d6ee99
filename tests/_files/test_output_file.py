"""Writing files: complete or not at all, JSON without NaN, and errors before the work."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from boxcov import BoxcovError
from boxcov._files.output_file import (
    atomic_write,
    check_writable,
    make_folder,
    remove_leftovers,
    to_json,
)


def test_a_whole_file_takes_the_place(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "x.txt") as temporary:
        temporary.write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["x.txt"]


def test_json_has_no_nan() -> None:
    with pytest.raises(BoxcovError, match="which JSON cannot express"):
        to_json({"loss": float("nan")})


@pytest.mark.parametrize("number", [np.float32(2.0), np.int64(2), torch.tensor(2.0)])
def test_json_takes_numbers_of_numpy_and_torch(number) -> None:
    assert json.loads(to_json([number])) == [2]
    with pytest.raises(BoxcovError, match="which JSON cannot express"):
        to_json(number * float("nan"))
    with pytest.raises(TypeError, match="Object of type set"):
        to_json({number})


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(BoxcovError, match=r"nowhere/x: cannot be written \(No such file"):
        check_writable(tmp_path / "nowhere" / "x")


def test_folders_are_made_except_below_a_file(tmp_path: Path) -> None:
    assert make_folder(tmp_path / "a" / "b").is_dir()
    with pytest.raises(BoxcovError, match=r"tables: cannot be written \(Not a directory\)"):
        make_folder(Path(__file__) / "tables")


def test_what_a_kill_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".x.txt.abcd_123").write_text("hal")
    (tmp_path / ".x.txt.mine").write_text("another file")
    remove_leftovers(tmp_path / "x.txt")
    assert [path.name for path in tmp_path.iterdir()] == [".x.txt.mine"]
