"""The only package that touches private torch API: a new torch release is the work of this package.

The rest of the library uses `_torch.name`; the modules group the names by subject.

    releases     the supported releases of torch
    tensors      tensors without data, storages, wrappers
    modes        the modes of a thread: entering, leaving, deactivating temporarily; torch's switches for them
    dispatch     dispatch keys, and thread-local state of the dispatcher
    schema       schemas, kernels, registered fakes
    features     names of torch that differ between releases
    sample_calls calls of operators on real tensors, from torch's database; for tools of developers
    graphs       graphs and graph modules of torch.fx, exported programs
    functorch    transforms of torch.func, higher-order operators
    checkpoints  torch.load and torch.save
    identity     names that are loaded on demand; classes that torch's tools check by isinstance; sympy types of torch
"""

from understudy._torch.releases import *  # isort: skip  -- before what an older torch does not have
from torch._C import DispatchKey as DispatchKey
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils._pytree import LeafSpec as LeafSpec
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

from understudy._torch.checkpoints import *
from understudy._torch.dispatch import *
from understudy._torch.features import *
from understudy._torch.functorch import *
from understudy._torch.graphs import *
from understudy._torch.identity import *
from understudy._torch.modes import *
from understudy._torch.sample_calls import sample_calls as sample_calls
from understudy._torch.sample_calls import sampled_operators as sampled_operators
from understudy._torch.schema import *
from understudy._torch.tensors import *
