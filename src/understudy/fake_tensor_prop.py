"""Fake values for the nodes of a graph, under the names of `torch.fx.passes.fake_tensor_prop`.

A program that imports from there changes one line.
"""

from understudy.prop.propagation import FakeTensorProp as FakeTensorProp
from understudy.torch_names import advise as _advise
from understudy.torch_names import module_getattr as _module_getattr

_advise(FakeTensorProp)
__getattr__ = _module_getattr(__name__)
__all__ = [name for name in dir() if not name.startswith("_")]
