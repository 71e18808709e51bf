# SPDX-License-Identifier: Apache-2.0
"""Lets the torchvision of PyPI, a CUDA build, be imported beside a CPU build of torch.

Its native library cannot be loaded there, so the operators that its Python code registers fake kernels for do
not exist and the import fails.  This module declares those operators (they stay without an implementation),
finds the installed torchvision behind itself on the path, and becomes it.
"""

import os
import sys
from contextlib import suppress
from importlib.machinery import PathFinder

import torch

_operators = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    with suppress(RuntimeError):  # declared already
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _become_the_real_one() -> None:
    stand_ins = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    path = [folder for folder in sys.path if os.path.realpath(folder or ".") != stand_ins]
    real = PathFinder.find_spec(__name__, path)
    if real is None or real.origin is None or real.submodule_search_locations is None:
        raise ModuleNotFoundError("torchvision is not installed behind its stand-in", name=__name__)
    module = sys.modules[__name__]
    module.__file__ = real.origin
    module.__path__ = __spec__.submodule_search_locations = list(real.submodule_search_locations)
    __spec__.origin = real.origin
    with open(real.origin, encoding="utf-8") as source:
        code = compile(source.read(), real.origin, "exec")
    exec(code, module.__dict__)


_become_the_real_one()
