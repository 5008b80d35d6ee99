"""COCO: images letterboxed as YOLOX expects them, and result files with covariances."""

from boxcov.data.coco.classes import CLASSES
from boxcov.data.coco.images import letterbox, read_image
from boxcov.data.coco.results import read_results, write_results
from boxcov.data.coco.sequence import Coco, frames

__all__ = ["CLASSES", "Coco", "frames", "letterbox", "read_image", "read_results", "write_results"]
