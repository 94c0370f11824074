"""Lets SGLang, which is built for GPUs, start on a machine without one.

Python runs this file by itself where the folder is on ``PYTHONPATH``.  torchvision's wheel
is linked against CUDA, so its operators are missing beside torch's CPU build, and its own
Python part ends the import over that.  Declared beforehand they are not missed; text
models never call them.
"""

from __future__ import annotations

import importlib.abc
import sys

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing; sees torchvision asked for and declares its operators first."""

    def __init__(self) -> None:
        self.library = None

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in OPERATORS:
                self.library.define(operator)
        return


sys.meta_path.insert(0, _BeforeTorchvision())
