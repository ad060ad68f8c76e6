"""Tensors that no node of the graph produces: parameters, buffers and constants, as attributes of the graph module.

AttributePaths          the names of attributes in the graph module
Constants               the tensors, the nodes that read them, and writes to them in a real run
OutsideTensors          real tensors that a program uses without its modules, while stand-ins are traced
restore_optimizers_after  undoes optimizer steps that were made during a trace
"""

from __future__ import annotations

import copy
import functools
import itertools
import keyword
import operator
import re
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.fx import Graph, GraphModule, Node
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from understudy import _torch
from understudy.errors import Context, DataDependentOutputException, MixedTensorsError
from understudy.fake.convert import spec_of_real
from understudy.fake.mode import FakeTensorMode
from understudy.fake.realise import make_new, make_snapshot
from understudy.fake.tensor import FakeTensor, count_writes
from understudy.graph.borrowed_state import EVERY_MODULE_HAS
from understudy.graph.node_values import set_val
from understudy.lines import user_frames, user_line
from understudy.ops.traits.writes import written_values
from understudy.spec.call import flat

if TYPE_CHECKING:
    from understudy.capture.program_caches import ProgramCaches
    from understudy.capture.tracer import PythonKeyTracer

ORIGINAL_PATH = "original_path"
"""In the metadata of a node: the attribute's path in the program, where the graph module uses another one."""
PLAIN_PATH = re.compile(r"\w+(\.\w+)*", re.ASCII)
OF_MODULES = frozenset(dir(torch.nn.Module()))


@functools.cache
def names_of_graph_modules() -> frozenset[str]:
    """Attributes that every graph module has, and names that its code uses."""
    own = {"self", "shape_env", "example_parameters", "example_state"}
    return frozenset({*dir(GraphModule(torch.nn.Module(), Graph())), *own})


@functools.cache
def names_to_replace() -> frozenset[str]:
    """Names that are not part of a path, or only inside of it."""
    return names_of_graph_modules().union(keyword.kwlist)


@functools.lru_cache(maxsize=8192)
def is_plain_path(path: str) -> bool:
    """Whether a path can be used in the code of a graph as it is."""
    return PLAIN_PATH.fullmatch(path) is not None and names_to_replace().isdisjoint(path.split("."))


class AttributePaths:
    """Chooses the paths of attributes in a graph module. A path is part of the graph's code, so it has to be made of
    identifiers; but a key of a `ParameterDict` may be any text, and a submodule may have the name of an attribute of
    every graph module."""

    def __init__(self) -> None:
        self.expected: set[str] = set()
        """The paths of the program, which may be requested."""
        self._originals: dict[str, str] = {}
        """Path in the graph module → path in the program."""
        self._safe: dict[tuple[str, str], str] = {}
        self._made: set[str] = set()
        self._occupied: tuple[int, set[str]] = 0, set()

    def choose(self, path: str) -> str:
        """Return the path, if it consists of identifiers and is free; else a similar one."""
        chosen = path if is_plain_path(path) else self._make_safe(path)
        if chosen in self._originals:
            numbered = (f"{chosen}_{number}" for number in itertools.count(1))
            chosen = next(
                one for one in numbered if one not in self._originals and one not in self._paths_of_program()
            )
        self._originals[chosen] = path
        return chosen

    def _make_safe(self, path: str) -> str:
        outer = ""
        for part in path.split("."):
            known = self._safe.get((outer, part))
            if known is None:
                known = self._safe[outer, part] = self._make_safe_part(outer, part)
            outer += known
        return outer[1:]

    def _make_safe_part(self, outer: str, part: str) -> str:
        """`.name`. `outer`: what comes before it, with a dot in front."""
        taken = OF_MODULES if outer else names_of_graph_modules()
        is_name = (
            part.isidentifier() and unicodedata.normalize("NFKC", part) == part
        )  # Python normalises identifiers
        if (is_name or part.isdecimal()) and not keyword.iskeyword(part) and part not in taken:
            return f".{part}"
        safe = re.sub(r"\W", "_", part, flags=re.ASCII) or "_"
        known = (self._made, self._paths_of_program())
        while (
            keyword.iskeyword(safe) or safe in taken or any(f"{outer}.{safe}"[1:] in paths for paths in known)
        ):
            safe += "_"
        self._made.add(f"{outer}.{safe}"[1:])
        return f".{safe}"

    def _paths_of_program(self) -> set[str]:
        """The expected paths, and those of the modules that contain them."""
        if self._occupied[0] != len(self.expected):
            found = set(self.expected)
            for path in self.expected:
                while "." in path:
                    path = path.rpartition(".")[0]
                    found.add(path)
            self._occupied = len(self.expected), found
        return self._occupied[1]


class Constants:
    """Maps tensors, by identity, to attributes of the graph module."""

    def __init__(self, tracer: PythonKeyTracer) -> None:
        self._tracer = tracer
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor, str | None]] = {}
        self._stand_in_of_real: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._nodes: dict[int, Node] = {}
        self._used_names: dict[str, int] = {}
        self._paths = AttributePaths()
        self._read_as: dict[str, torch.Tensor] = {}
        """The tensors that nodes read, by their names in the graph module."""
        self.allow_fakes = False
        self.outer: Constants | None = None
        """The constants of the surrounding program, for a branch: modules of branches are borrowed with all others."""
        self.mode_of_program: Any = _torch.active_fake_mode() if _torch.active_recorder() is None else None
        """The mode of the program's inputs: other stand-ins of this mode may be constants."""
        self.without_gradient = False
        self.knows_values = False
        """Whether values of parameters and buffers are constants of the program: see `read_value`."""
        self._reads: dict[int, tuple[torch.Tensor, str]] = {}
        """The tensors whose values were read, with the line of the first read."""
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        self._storages: set[int] = set()
        self._in_storages = 0

    def expect(self, tensor: torch.Tensor, real: torch.Tensor, name: str | None) -> None:
        """Register `tensor`: nodes that use it read `real`, under this name if one is given."""
        if name is not None:
            self._paths.expected.add(name)
        self._known.setdefault(id(tensor), (tensor, real, name))
        if tensor is not real:
            self._stand_in_of_real[id(real)] = (real, tensor)
        if type(tensor) is not FakeTensor and _torch.is_traceable_wrapper_subclass(tensor):
            # operators on a wrapper become operators on its inner tensors
            for part in tensor.__tensor_flatten__()[0]:
                self.expect(getattr(tensor, part), getattr(real, part), name and f"{name}_{part}")

    def stand_in_of(self, real: torch.Tensor) -> torch.Tensor | None:
        """The stand-in of this real tensor, None if it has none."""
        pair = self._stand_in_of_real.get(id(real))
        return pair[1] if pair is not None and pair[0] is real else None

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether this is a parameter, buffer or constant of the program."""
        return id(tensor) in self._known and self._known[id(tensor)][0] is tensor

    def real_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that nodes read for this one: itself, or the original of a stand-in."""
        if self.contains(tensor):
            return self._known[id(tensor)][1]
        return tensor if self.outer is None else self.outer.real_of(tensor)

    def existing(self, tensor: torch.Tensor) -> Node | None:
        """Return the `get_attr` node of a tensor, or None."""
        return self._nodes.get(id(tensor)) if self.contains(tensor) else None

    def node_of(self, tensor: torch.Tensor) -> Node:
        """The `get_attr` node of a tensor, made on first use."""
        identity = id(tensor)
        known = self._known.get(identity)
        if known is None or known[0] is not tensor:
            real = tensor if self.outer is None else self.outer.real_of(tensor)
            if real is tensor:
                self._refuse_fake(tensor)
            known = self._known[identity] = (tensor, real, None)
        node = self._nodes.get(identity)
        if node is None:
            node = self._nodes[identity] = self._make_node(*known)
        return node

    def named_nodes(self) -> dict[Node, str]:
        """The `get_attr` nodes of named tensors, with their names."""
        names = {identity: name for identity, (_, _, name) in self._known.items() if name is not None}
        return {node: names[identity] for identity, node in self._nodes.items() if identity in names}

    def value_read_by(self, node: Node) -> Any:
        """What this `get_attr` node reads, or the module that a `call_module` node calls."""
        target = str(node.target)
        return self._read_as[target] if target in self._read_as else getattr(self._tracer.root, target)

    def node_of_object(self, value: object, prefix: str) -> Node:
        """As `node_of`, for an object that is not a tensor and can't be written as a literal."""
        node = self._nodes.get(id(value))
        if node is None:
            name = self._fresh(prefix)
            attach(self._tracer.root, name, value)
            node = self._nodes[id(value)] = self._tracer.graph.create_node(
                "get_attr", name, (), {}, name=name
            )
        return node

    # --- values that the program reads -------------------------------------------------------------------------

    def read_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A real tensor with the value of a parameter or buffer to which the trace has not written; None for others. The
        graph keeps what the program reads of it, as torch's graphs do."""
        if not self.contains(tensor):
            return None if self.outer is None else self.outer.read_value(tensor)
        real = self.real_of(tensor)
        if not self.knows_values or type(real) not in REAL or real.is_meta or self._is_written(tensor):
            return None
        self._reads.setdefault(id(tensor), (tensor, user_line()))
        return real

    def check_reads(self) -> None:
        """Refuse a trace that wrote to a tensor after it had read its value."""
        for tensor, line in self._reads.values():
            if self._is_written(tensor):
                _, real, name = self._known[id(tensor)]
                kind = "parameter" if is_parameter(real) else "buffer"
                raise refuse_written_constant(f"the {kind} {name!r}" if name else describe_real(real), line)

    def _is_written(self, tensor: torch.Tensor) -> bool:
        """Whether the trace has written to the memory of a parameter or buffer."""
        own, current = self._nodes.get(id(tensor)), self._tracer.find_node(tensor)
        if current not in (None, own) or (own is not None and _is_written_by_user(own)):
            return True
        if type(tensor) is FakeTensor:
            return tensor.is_inference() or count_writes(tensor) != (0, 0)
        return _torch.storage_id(tensor) in self._saved

    # --- writes while tracing for real -------------------------------------------------------------------------

    def before_write(self, func: object, args: object, kwargs: object) -> None:
        """Called before a write in a real run: save the memory of the module's tensors, to restore it after the trace."""
        for tensor in flat(torch.Tensor, written_values(func, args, kwargs), {}):
            key = _torch.storage_id(tensor)
            if key in self._find_storages() and key not in self._saved and has_memory(tensor):
                with _torch.no_modes():
                    storage = tensor.untyped_storage()
                    self._saved[key] = storage, _bytes_of(storage).clone()

    def _find_storages(self) -> set[int]:
        if self._in_storages != len(self._known):  # the program has made or used others since the last write
            new = [real for _, real, _ in itertools.islice(self._known.values(), self._in_storages, None)]
            self._storages.update(_torch.storage_id(real) for real in new if real.layout is torch.strided)
            self._in_storages = len(self._known)
        return self._storages

    def put_back(self) -> None:
        for tensor, real, _ in self._known.values():
            # Below all function modes: a real tensor may have been given a gradient without data.
            if (
                tensor is real
                and type(real) is not FakeTensor
                and real.is_leaf
                and type(real.grad) is FakeTensor
            ):
                real.grad = None
        with _torch.no_modes():
            for storage, before in self._saved.values():
                size = min(storage.nbytes(), before.nbytes)  # the program may have resized it
                _bytes_of(storage)[:size].copy_(before[:size])
        self._saved.clear()

    def _refuse_fake(self, tensor: torch.Tensor) -> None:
        # In a fake mode of the user, stand-ins of that mode may be constants.
        if (
            type(tensor) is FakeTensor
            and not self.allow_fakes
            and tensor.fake_mode is not self.mode_of_program
        ):
            raise MixedTensorsError(
                f"{tensor._spec} is a stand-in that was made outside of this trace: a graph can't hold it as a constant",
                context=Context(
                    line=user_line(),
                    hint="pass it as an input, or allow it: make_fx(..., _allow_fake_constant=True)",
                ),
            )

    def _make_node(self, tensor: torch.Tensor, real: torch.Tensor, name: str | None) -> Node:
        node = self._read(real, name)
        if type(tensor) is FakeTensor:
            meta = node.meta
            meta["val"] = make_snapshot(tensor.fake_mode, tensor)
            meta["tensor_meta"] = self._tracer.node_meta.tensor_meta(tensor, tensor.requires_grad)
            return node
        value = self._as_fake(tensor)
        if type(value) is FakeTensor:  # a new one, on a storage of its own: it needs no snapshot
            node.meta["val"] = value
            node.meta["tensor_meta"] = self._tracer.node_meta.tensor_meta(value)
        else:
            set_val(node, value)
        return node

    def _read(self, real: torch.Tensor, name: str | None) -> Node:
        """A node that reads this tensor, under this name if one is given."""
        if name is None:
            name = self._fresh("_param_constant" if is_parameter(real) else "_tensor_constant")
            path = name
        else:
            path, name = name, self._paths.choose(name)
        value = self._detach(real) if self.without_gradient and real.requires_grad else real
        self._read_as[name] = value
        if "." not in name:  # submodules are made once, with the graph module
            set_attribute(self._tracer.root, name, value)
        node = self._tracer.append_read(name)
        if path != name:
            node.meta[ORIGINAL_PATH] = path
        return node

    @staticmethod
    def _detach(real: torch.Tensor) -> torch.Tensor:
        with _torch.no_modes():
            return real.detach()

    def _as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return tensor
        return make_new(self._stand_ins, spec_of_real(tensor))

    @functools.cached_property
    def _stand_ins(self) -> FakeTensorMode:
        return FakeTensorMode()

    def graph_module(self, graph: Graph, name: str) -> GraphModule:
        """A graph module of this graph, with the tensors and modules that its nodes read as attributes."""
        # Without `GraphModule.__init__`, which looks up and copies each attribute by its path.
        gm = _torch.lazy_graph_module(torch.nn.Module(), Graph(tracer_cls=type(self._tracer)), name)
        nodes = [node for op in ("get_attr", "call_module") for node in graph.find_nodes(op=op)]
        parents: dict[str, torch.nn.Module] = {"": gm}
        # Outer paths first: an attribute may be a module that contains others.
        targets = [str(node.target) for node in nodes]
        for target in sorted(targets, key=operator.methodcaller("count", ".")):
            path, _, last = target.rpartition(".")
            value = self._read_as[target] if target in self._read_as else getattr(self._tracer.root, target)
            set_attribute(_parent(parents, path), last, value)
        gm.graph = graph
        return gm

    def _fresh(self, prefix: str) -> str:
        number = self._used_names.get(prefix, 0)
        while self._is_taken(name := f"{prefix}{number}"):
            number += 1
        self._used_names[prefix] = number + 1
        return name

    def _is_taken(self, name: str) -> bool:
        root = self._tracer.root
        # `hasattr(root, name)` would raise and catch an error for almost every name.
        return (
            name in self._paths.expected or name in root._parameters or name in root._buffers or name in root._modules
            or name in vars(root) or name in OF_MODULES
        )  # fmt: skip


def has_memory(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and not _torch.is_stand_in(tensor)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def attach(root: torch.nn.Module, name: str, tensor: object) -> None:
    """Set `root.a.b.c` to this tensor, making submodules as needed."""
    path, _, last = name.rpartition(".")
    set_attribute(_parent({"": root}, path), last, tensor)


def _parent(known: dict[str, torch.nn.Module], path: str) -> torch.nn.Module:
    """Return the module at this path, created if it is missing. `known`: modules found before, by path."""
    found = known.get(path)
    if found is None:
        outer_path, _, name = path.rpartition(".")
        outer = _parent(known, outer_path)
        inner = outer._modules.get(name)
        if inner is None:
            inner = outer._modules[name] = plain_module()
        found = known[path] = inner
    return found


_CONTAINERS = [
    (name, type(value)) for name, value in EVERY_MODULE_HAS.items() if isinstance(value, (dict, set, list))
]


def plain_module() -> torch.nn.Module:
    """`torch.nn.Module()` at half the cost: a graph of many layers needs hundreds of them."""
    module = torch.nn.Module.__new__(torch.nn.Module)
    attributes = vars(module)
    attributes.update(EVERY_MODULE_HAS)
    for name, kind in _CONTAINERS:
        attributes[name] = kind()
    return module


def _is_written_by_user(node: Node) -> bool:
    """Whether a call in the graph writes to what this node returns. Kernels of batch norms count no writes."""
    return any(
        node in flat(Node, (written_values(user.target, user.args, user.kwargs),), {})
        for user in node.users
        if isinstance(user.target, _torch.OpOverload)
    )


def refuse_written_constant(what: str, read_at: str | None) -> DataDependentOutputException:
    """The error for a constant whose value was read and which is written to."""
    return DataDependentOutputException(
        f"the value of {what} was read{f' at {read_at}' if read_at else ''}, and the program also writes to it: the graph "
        "would keep the value of this run",
        context=Context(line=user_line(), hint="pass it as an input, or read its value before the trace"),
    )


def describe_real(real: torch.Tensor) -> str:
    """`the tensor 'count', i64[]@cpu`: by the name that it has in the calling functions."""
    shown = str(spec_of_real(real))
    for frame in user_frames():
        for variables in (frame.f_locals, frame.f_globals):
            for name, value in list(variables.items()):
                if value is real:
                    return f"the tensor {name!r}, {shown}"
    return f"the tensor {shown}"


def is_parameter(value: object) -> TypeGuard[torch.nn.Parameter]:
    """`isinstance(value, torch.nn.Parameter)`, which torch answers in Python, without that for plain tensors."""
    kind = type(value)
    if kind is torch.nn.Parameter:
        return True
    if kind is torch.Tensor and "_is_param" not in value.__dict__:
        return False
    return isinstance(value, torch.nn.Parameter)


def set_attribute(module: torch.nn.Module, name: str, value: object) -> None:
    """Set an attribute of a module in the dict to which it belongs."""
    if type(value) is torch.nn.Parameter or is_parameter(value):
        module._parameters[name] = value
    elif isinstance(value, torch.Tensor):
        module._buffers[name] = value
    else:
        setattr(module, name, value)


# --- Tensors that a program uses without its modules: a list of parameters, an optimizer's, in a closure ---------
# While stand-ins are traced, real tensors of borrowed modules are replaced by their stand-ins in every torch function:
# `torch.autograd.grad(loss, params)` and `[p.grad for p in params]` then refer to the tensors that the program computed
# with. So is every other tensor that requires grad: no gradient is left on a tensor of the user. Steps of optimizers
# are undone.

REAL = frozenset({torch.Tensor, torch.nn.Parameter})
SEQUENCES = frozenset({list, tuple})
REAL_OR_SEQUENCES = REAL | SEQUENCES


def has_reals(values: Any) -> bool:
    """Whether the arguments of a torch function contain a real tensor."""
    for value in values:
        kind = type(value)
        if kind in REAL or (kind in SEQUENCES and not REAL.isdisjoint(map(type, value))):
            return True
    return False


class OutsideTensors:
    """The stand-ins of real tensors during one trace."""

    def __init__(self, constants: Constants, mode: FakeTensorMode, cached: ProgramCaches) -> None:
        self._constants = constants
        self._mode = mode
        self._cached = cached

    def replace(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a torch function with real tensors replaced by stand-ins."""
        return tuple(map(self._replace, args)), {name: self._replace(value) for name, value in kwargs.items()}

    def _replace(self, value: Any) -> Any:
        kind = type(value)
        if kind in REAL:
            return self._stand_in(value)
        if kind in SEQUENCES:
            return kind([self._stand_in(part) if type(part) in REAL else part for part in value])
        return value

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        found = self._constants.stand_in_of(tensor)
        if found is not None:
            return found
        with _torch.NoFunctionModes():
            if not self._is_replaced(tensor):
                return tensor
            fake = self._mode.from_tensor(tensor, static_shapes=True)
        self._constants.expect(fake, tensor, None)
        return fake

    def _is_replaced(self, tensor: torch.Tensor) -> bool:
        if self._mode.allow_non_fake_inputs:
            return tensor.requires_grad and tensor.is_leaf and not _torch.is_functorch_wrapped(tensor)
        return self._cached.holds(tensor)


class KeptOptimizer:
    """State and groups of an optimizer, as they were: `load_state_dict` replaces both, `add_param_group` adds to them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._state = optimizer.state
        self._entries = {parameter: copy.copy(entries) for parameter, entries in optimizer.state.items()}
        self._groups = optimizer.param_groups
        self._options = [(group, dict(group)) for group in optimizer.param_groups]

    def restore(self) -> None:
        self._state.clear()
        self._state.update(self._entries)
        for group, options in self._options:
            group.clear()
            group.update(options)
        self._groups[:] = [group for group, _ in self._options]
        self._optimizer.state, self._optimizer.param_groups = self._state, self._groups


@contextmanager
def restore_optimizers_after() -> Iterator[None]:
    """Restore the state and options of optimizers that make a step inside, in this thread."""
    before: dict[Optimizer, KeptOptimizer] = {}

    def remember(optimizer: Optimizer, args: object, kwargs: object) -> None:
        if optimizer not in before and _torch.active_recorder() is not None:
            before[optimizer] = KeptOptimizer(optimizer)

    handle = register_optimizer_step_pre_hook(remember)
    try:
        yield
    finally:
        handle.remove()
        for kept in before.values():
            kept.restore()
