"""The configuration of a YOLOX: its size and which boxes it reports."""

from __future__ import annotations

from dataclasses import dataclass

from boxcov.data.coco.classes import CLASSES
from boxcov.errors import BoxcovError

STRIDES = (8, 16, 32)  # pixels per cell, by level
# width and depth of the released networks
SIZES = {"nano": (16, 1), "tiny": (24, 1), "s": (32, 1), "m": (48, 2), "l": (64, 3), "x": (80, 4)}


@dataclass(frozen=True)
class Config:
    """A YOLOX. The released networks are ``Config.named("nano")`` to ``Config.named("x")``."""

    width: int  # channels of the first convolution; all others are multiples of it
    depth: int  # bottlenecks of a short stage; a long one has three times as many
    depthwise: bool = False  # nano: 3x3 convolutions are depthwise, each followed by a 1x1
    norm: bool = True  # False: BatchNorm is folded into the convolutions, which have a bias
    classes: tuple[str, ...] = CLASSES
    threshold: float = 0.3  # on the score, the product of objectness and class
    overlap: float = 0.65  # IoU above which a better box of the same class suppresses another
    max_boxes: int = 100  # per image
    logit: bool = False  # whether the score logit is a fifth number of each box

    def __post_init__(self) -> None:
        if self.width < 1 or self.depth < 1 or not self.classes:
            raise BoxcovError(
                "a YOLOX needs a width and a depth of at least 1 and classes, "
                f"got {self.width}, {self.depth} and {self.classes}"
            )
        if not 0 <= self.threshold <= 1 or not 0 < self.overlap <= 1 or self.max_boxes < 1:
            raise BoxcovError(
                "threshold must be from 0 to 1, overlap above 0 and at most 1, "
                f"max_boxes at least 1, got {self.threshold}, {self.overlap} and {self.max_boxes}"
            )

    @staticmethod
    def named(name: str) -> Config:
        """Return the config of a released network: nano, tiny, s, m, l or x."""
        if name not in SIZES:
            raise BoxcovError(f"no YOLOX {name!r}: there are {', '.join(SIZES)}")
        width, depth = SIZES[name]
        return Config(width, depth, depthwise=name == "nano")

    @property
    def size(self) -> int:
        """Side in pixels of the images that the released network of this width was trained on."""
        return 416 if self.width <= SIZES["tiny"][0] else 640

    @property
    def box_fields(self) -> tuple[str, ...]:
        return ("x1", "y1", "x2", "y2", *(("logit",) if self.logit else ()))
