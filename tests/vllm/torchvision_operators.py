"""Lets a torchvision that was built for CUDA be imported beside a torch that was not.

vLLM's module of Qwen3.5 models imports it, since they may read pictures. There its own library
can't be loaded, which it bears, but it describes operators that come with it. `make test-vllm`
copies this file into its environment and has it imported at the start of every process.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder

OPERATORS = ("nms", "qnms")


class DeclaresOperators(MetaPathFinder):
    """Finds nothing; declares the operators when torchvision is looked for."""

    def __init__(self) -> None:
        self.library = None

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for name in OPERATORS:
                self.library.define(
                    f"{name}(Tensor dets, Tensor scores, float threshold) -> Tensor"
                )


sys.meta_path.insert(0, DeclaresOperators())
