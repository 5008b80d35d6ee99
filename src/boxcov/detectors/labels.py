"""The classes that a detector reports, and the class numbers of its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from boxcov.data.coco.classes import CLASSES
from boxcov.errors import BoxcovError, join_names

# COCO classes that some models call by their names in Pascal VOC
_VOC_NAMES = {
    "motorbike": "motorcycle",
    "aeroplane": "airplane",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
    "tvmonitor": "tv",
}
_NO_CLASS = ("N/A", "__background__")


@dataclass(frozen=True)
class Labels:
    """The reported classes and the model's number of each; other numbers are never reported.

    >>> labels = Labels.of({0: "N/A", 1: "cat", 2: "dog"})
    >>> labels.classes, labels.of_model(torch.tensor([2, 0]), 3)
    (('cat', 'dog'), tensor([ 1, -1]))
    >>> labels.to_model(torch.tensor([0, 1]))
    tensor([1, 2])
    """

    classes: tuple[str, ...]
    numbers: tuple[int, ...]  # the model's number of each class

    def __post_init__(self) -> None:
        if not self.classes or any(len(set(x)) < len(x) for x in (self.classes, self.numbers)):
            names = join_names(self.classes) or "none"
            raise BoxcovError(f"classes must be different names, at least one, got {names}")

    @staticmethod
    def of(
        names: Mapping[int, str], classes: Sequence[str] | Mapping[str, int] | None = None
    ) -> Labels:
        """Return the labels of a model whose numbers have these names.

        classes: the names to report, or a dict from new names to the model's numbers; by default
        COCO's 80 classes if the model has all of them, else all classes of the model.

        >>> Labels.of({0: "LABEL_0", 1: "LABEL_1"}, {"cow": 1})
        Labels(classes=('cow',), numbers=(1,))
        """
        if isinstance(classes, str):
            raise BoxcovError(f"classes must be a list of names, got the string {classes!r}")
        if isinstance(classes, Mapping):
            wrong = [f"{name}: {number}" for name, number in classes.items() if number not in names]
            if wrong:
                raise BoxcovError(
                    f"classes give numbers that the model does not have: {join_names(wrong)}; "
                    f"it has {min(names)} to {max(names)}"
                )
            return Labels(tuple(classes), tuple(classes.values()))
        known: dict[str, list[int]] = {}
        for number, name in names.items():
            if name not in _NO_CLASS:
                known.setdefault(name, []).append(number)
        if classes is None:
            modern: dict[str, list[int]] = {}
            for name, numbers in known.items():
                modern.setdefault(_VOC_NAMES.get(name, name), []).extend(numbers)
            coco = all(name in modern for name in CLASSES)
            known, classes = (modern, CLASSES) if coco else (known, tuple(known))
        unknown = [name for name in classes if name not in known]
        if unknown:
            raise BoxcovError(
                f"classes name {join_names(unknown)}, unknown to the model: it has "
                f"{join_names(known)}. To rename, give a dict of names and the model's numbers"
            )
        twice = [name for name in classes if len(known[name]) > 1]
        if twice:
            raise BoxcovError(
                f"the model has several numbers for {join_names(twice)}: "
                "give classes as a dict of names and the model's numbers"
            )
        return Labels(tuple(classes), tuple(known[name][0] for name in classes))

    def of_model(self, numbers: Tensor, count: int) -> Tensor:
        """Return the indices into ``classes`` of a model's numbers; -1 marks unreported ones.

        count: the number of classes of the model.
        """
        table = torch.full((count,), -1, device=numbers.device)
        table[list(self.numbers)] = torch.arange(len(self.numbers), device=numbers.device)
        return table[numbers]

    def to_model(self, labels: Tensor) -> Tensor:
        """Return the model's numbers of indices into ``classes``."""
        return torch.tensor(self.numbers, device=labels.device)[labels]
