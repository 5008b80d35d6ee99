from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from boxcov._torch.modules import _have_finite_sums, fingerprint, fresh, ready, shadow
from boxcov.errors import NotFiniteFrameError

CPU = torch.device("cpu")


class Odd(nn.Module):
    """Uses its modules through a list, a dict and a bound method."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.stages = [self.norm]
        self.by_name = {"drop": self.drop}
        self.step = self.norm.forward

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.shape
        return self.by_name["drop"](self.step(self.stages[0](x)))


def test_a_shadow_is_in_eval_mode_and_has_no_side_effects() -> None:
    module = Odd().train()
    twin = shadow(module)
    x = torch.randn(8, 2)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert torch.equal(twin(x), twin(x))  # no dropout
    # the running statistics are unchanged
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert not hasattr(module, "seen")
    assert all(m.training for m in module.modules())
    assert not any(m.training for m in twin.modules())
    assert all(a is b for a, b in zip(module.parameters(), twin.parameters()))


def test_a_shadow_follows_its_module_to_new_weights_and_buffers() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    twin = shadow(module)
    module.double()
    module[1].running_mean += 1
    x = torch.randn(3, 2, dtype=torch.float64)
    assert torch.equal(twin(x), module.eval()(x))


def test_a_module_under_two_names_stays_one() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module.add_module("again", module[0])
    twin = shadow(module)
    assert twin[0] is twin.again
    assert twin[0] is not module[0]


def test_parameters_can_be_exchanged() -> None:
    module = nn.Linear(2, 2)
    other = nn.Parameter(torch.zeros(2, 2))
    twin = shadow(module, {id(module.weight): other})
    assert twin.weight is other
    assert module.weight is not other
    assert twin.bias is module.bias


def test_script_modules_are_shared() -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inner = torch.jit.script(nn.Linear(2, 2)).eval()
    module = nn.Sequential(inner)
    assert shadow(module)[0] is inner


def test_fingerprints_tell_weights_names_shapes_and_types_apart() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    first = fingerprint(module)
    assert fingerprint(shadow(module)) == first
    module[1].num_batches_tracked += 1  # not a weight
    assert fingerprint(module) == first
    module[1].running_var += 1e-3
    assert fingerprint(module) != first
    assert fingerprint(module.double()) != fingerprint(module.float().half())
    assert fingerprint(nn.Linear(0, 0)) != first


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_inputs_whose_sum_overflows_are_accepted(dtype: torch.dtype) -> None:
    large = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    inputs = {"points": [large, torch.zeros(0, 5)], "names": "a"}
    assert torch.equal(ready(inputs, CPU)["points"][0], large)


def test_an_image_of_float16_takes_one_pass() -> None:
    image = torch.full((3, 64, 64), 100, dtype=torch.float16)
    assert _have_finite_sums([image, torch.ones(2)])


@pytest.mark.parametrize("values", [[torch.inf, -torch.inf], [torch.nan, 1.0], [-torch.inf, 1.0]])
def test_inputs_that_are_not_finite_are_counted(values: list[float]) -> None:
    bad = torch.tensor([0.0, *values])
    count = int((~bad.isfinite()).sum())
    with pytest.raises(NotFiniteFrameError, match=rf"inputs\[1\] holds {count} NaN .* of 3"):
        ready([torch.ones(4), bad], CPU)


def test_a_copy_for_one_pass_shares_no_array() -> None:
    given = {"points": [np.zeros(2), torch.zeros(2)], "name": "a"}
    copy = fresh(given)
    for array in copy["points"]:
        array += 1
    assert not any(bool(array.any()) for array in given["points"])
    assert copy["name"] == "a"
