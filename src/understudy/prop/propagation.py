"""FakeTensorProp: run a graph node by node on stand-ins, and write the value of each node into its metadata.

After an edit, a node is run again if it was edited, if a value that it reads has other specs than before, or if its
value aliases a storage that was replaced. Other nodes cost nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule, Node

from understudy import _torch
from understudy.fake.inputs import is_readable
from understudy.fake.mode import FakeTensorMode
from understudy.fake.realise import make_view
from understudy.fake.tensor import FakeTensor
from understudy.graph.borrowed_state import BorrowedState
from understudy.graph.node_origins import locate_error
from understudy.graph.node_values import (
    convert_to_fakes,
    has_equal_metadata,
    is_complete,
    is_constant,
    needs_dispatch,
    return_tensor,
    snapshot,
    spec_of_val,
    storages_of,
    tensor_meta_of,
    val_of,
)
from understudy.graph.random_state import CHANGES_OF_GENERATOR
from understudy.prop.targets import (
    SubgraphAnswers,
    direct_arguments,
    fetch,
    restore_settings,
    takes_graphs,
    target_of,
    wrap_subgraphs,
)
from understudy.shapes.algebra.conditions import Condition
from understudy.shapes.algebra.floats import FloatExpr
from understudy.shapes.bindings import (
    KeyPath,
    compute_unbacked_bindings,
    rebind_unbacked,
    unbacked_symbols_in,
    values_in,
)
from understudy.shapes.env import ShapeEnv
from understudy.shapes.node import SymNode
from understudy.spec import TensorSpec
from understudy.spec.call import map_structure

MISSING = object()


class EditedNodes:
    """The nodes to run again, in the order of the graph."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._heap: list[Node] = []
        self._queued: set[Node] = set()
        for node in nodes:
            self.add(node)

    def add(self, node: Node) -> None:
        if node not in self._queued and not node._erased:
            self._queued.add(node)
            heapq.heappush(self._heap, node)

    def run_affected(
        self,
        values: dict[Node, object],
        compute: Callable[[Node], object],
        record: Callable[[Node, object], None],
    ) -> list[Node]:
        """Run them, and the nodes that they affect. Returns the nodes that were run."""
        done: list[Node] = []
        while self._heap:
            node = heapq.heappop(self._heap)
            self._queued.discard(node)
            unknown = [other for other in node.all_input_nodes if other not in values]
            if unknown:
                for other in (*unknown, node):
                    self.add(other)
                continue
            old, new = values.get(node, MISSING), compute(node)
            done.append(node)
            self._compare(node, old, new, values, record)
        return done

    def _compare(
        self,
        node: Node,
        old: object,
        new: object,
        values: dict[Node, object],
        record: Callable[[Node, object], None],
    ) -> None:
        before = set(storages_of(old))
        if not has_equal_metadata(old, new):
            record(node, new)
            for user in node.users:
                self.add(user)
        elif storages_of(old) != storages_of(new):
            record(node, new)
            for user in node.users:  # users that alias it
                if user in values and not before.isdisjoint(storages_of(values[user])):
                    self.add(user)


# --- Symbols of an earlier run ----------------------------------------

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def rename_symbols(mode: FakeTensorMode, value: object) -> Any:
    """The same tensors and numbers, with renamed symbols replaced."""
    env = mode.shape_env

    def rename_value(value: object) -> object:
        if isinstance(value, FloatExpr):
            return env.numbers.make_float(value.operation, *map(rename_value, value.arguments))
        return env.torch_api.merge_symbols(value) if isinstance(value, Condition) else env.simplify(value)

    def rename(size: object) -> Any:
        return env.node(rename_value(size.value), size.kind) if type(size) is SymNode else size

    def of_spec(spec: TensorSpec) -> TensorSpec:
        shape, stride = tuple(map(rename, spec.shape)), tuple(map(rename, spec.stride))
        return spec.as_view(shape, stride, rename(spec.offset))

    def of_leaf(leaf: Any) -> object:
        if not isinstance(leaf, torch.Tensor):
            node = leaf.node
            return rename(node).symbolic if type(node) is SymNode else leaf
        if type(leaf) is not FakeTensor or not leaf._spec.is_symbolic or leaf._spec.sparse is not None:
            return leaf
        spec = of_spec(leaf._spec)
        return leaf if spec is leaf._spec else make_view(mode, leaf, spec)

    return map_structure(of_leaf, (torch.Tensor, *SYMBOLIC), value)


# --- A graph run again on stand-ins, whose data-dependent sizes are those of the first run ------------------


class PropagateUnbackedSymInts(torch.fx.Interpreter):
    """Runs a graph inside a fake mode, and unifies new unbacked symbols with those in `meta["unbacked_bindings"]`."""

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        mode = _torch.active_fake_mode()
        if mode is None:
            raise AssertionError("expected an active FakeTensorMode; run the graph inside one: with mode: …")
        rebind_unbacked(mode.shape_env, n, result)
        return result


OVERRIDABLE = (
    "run", "run_node", "placeholder", "get_attr", "call_function", "call_method", "call_module", "output", "fetch_attr",
    "fetch_args_kwargs_from_env", "map_nodes_to_values",
)  # fmt: skip
"""Methods of `torch.fx.Interpreter` that our loop does not call: if a subclass overrides one, torch's loop is used."""


OWN_TYPES = frozenset({FakeTensor, torch.Tensor, torch.nn.Parameter})
ENDS = ("placeholder", "output")
NOTHING: dict[str, Any] = {}


class LazyModeEntry:
    """A context manager inside which a mode can be entered later, once."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._entered: Any = None

    def __enter__(self) -> None:
        pass

    def enter(self) -> None:
        if self._entered is None:
            self._entered = _torch.FakeModeEntry(self._mode)
            self._entered.enter(self._mode.patch_scopes)

    def __exit__(self, *exception: object) -> None:
        if self._entered is not None:
            self._entered.leave(exception[1])


class FakeTensorProp(torch.fx.Interpreter):
    """Runs a graph module on stand-ins and writes the value of each node into its `meta["val"]`.

        prop = FakeTensorProp(graph_module)
        prop.propagate(torch.randn(2, 3))
        [node.meta["val"].shape for node in graph_module.graph.nodes]

    A `val` is a stand-in, a number, a symbol, or a structure of these. Views share storage with their base. The
    module's own tensors are replaced by stand-ins while it runs, and restored.

    After an edit of the graph, `repropagate(nodes)` runs the edited nodes and those that they affect.
    `tensor_meta=True` also fills `meta["tensor_meta"]`. `mode` may be torch's own `FakeTensorMode`: the graph is then run
    in a mode like it, and torch's fakes among the arguments are converted.
    """

    def __init__(
        self, module: GraphModule, mode: FakeTensorMode | None = None, *, tensor_meta: bool = False,
        outer: FakeTensorProp | None = None,
    ) -> None:  # fmt: skip
        super().__init__(module, garbage_collect_values=False)  # values without data cost no memory
        self._mode = mode_for(module) if mode is None else own_mode(mode)
        self._tensor_meta = tensor_meta
        self._subgraphs: SubgraphAnswers = SubgraphAnswers() if outer is None else outer._subgraphs
        self._state: BorrowedState = BorrowedState(self._mode) if outer is None else outer._state
        self._constants: dict[Any, torch.Tensor] = {}
        """Stand-ins of the module's own tensors, by their paths."""
        self._odd: set[Node] = set()
        self._odd_for_autograd: set[Node] = set()
        self._exposed: set[Node] = set()
        self._entry: LazyModeEntry | None = None
        self._writes = self._moves = self._is_alone = self._grad = False
        if outer is None:
            self._mode.epoch += 1  # unbacked symbols of an earlier run are not reused

    @property
    def mode(self) -> FakeTensorMode:
        return self._mode

    @property
    def seen_subgraphs(self) -> set[Any]:
        """The identifiers of subgraphs (`invoke_subgraph`) whose nodes have values; others are propagated when they are
        first called. Add an identifier to leave its nodes alone."""
        return self._subgraphs.seen

    # --- the whole graph --------------------------------------------------------------------------------------

    def propagate(self, *args: object, changed: Iterable[Node] | None = None) -> Any:
        """Run the graph on these arguments, with real tensors converted; returns its output.

        With `changed`, and no arguments: as `repropagate(changed)`.
        """
        if changed is None:
            return self.propagate_dont_convert_inputs(*[self._convert(value) for value in args])
        if args:
            raise TypeError(
                "propagate(changed=...): expected no other arguments (it uses those of the last run)"
            )
        self.repropagate(changed)
        return self.graph.process_outputs(self.env[self._output_node()])

    def propagate_dont_convert_inputs(self, *args: object) -> Any:
        """Run the graph on arguments that are stand-ins already; returns its output."""
        args = tuple(map(self._convert_torch_fakes, args))
        self._convert_constants()
        with self._enter_run():
            if self._has_overrides():
                return super().run(*args)
            return self._sweep(self.graph.process_inputs(*args))

    def _convert_constants(self) -> None:
        """Called once before each run, because conversion is cheaper outside of the mode."""
        constants = {}
        for node in self.graph.nodes:
            if node.op == "get_attr" and node.target not in constants:
                value = self.fetch_attr(node.target)
                if isinstance(value, torch.Tensor):
                    constants[node.target] = fake = convert_to_fakes(self._mode, value)
                    if (
                        is_constant(node)
                        and type(fake) is FakeTensor
                        and type(value) is torch.Tensor
                        and is_readable(value)
                    ):
                        self._mode.fake_tensor_converter.read_values(self._mode, value, fake)
        self._constants = constants

    def _convert(self, value: object) -> object:
        def convert(part: object) -> object:
            return self._mode.from_tensor(part) if isinstance(part, torch.Tensor) else part

        value = self._convert_torch_fakes(value)
        if isinstance(value, torch.Tensor):
            return value if self._mode.is_our_fake(value) else convert(value)
        return _torch.tree_map(convert, value) if isinstance(value, (list, tuple, dict)) else value

    def _convert_torch_fakes(self, value: object) -> object:
        """An argument with torch's own fakes replaced by stand-ins."""

        def convert(part: object) -> object:
            kind = type(part)
            if kind in OWN_TYPES or not issubclass(kind, torch.Tensor) or not _torch.is_torch_fake(part):
                return part
            if any(isinstance(size, torch.SymInt) for size in part.shape):  # type: ignore[attr-defined]
                raise TypeError(
                    "FakeTensorProp: expected plain sizes, got a fake of torch's own mode with symbolic sizes; pass a real "
                    "tensor, or a stand-in of understudy.FakeTensorMode(shape_env=understudy.ShapeEnv())"
                )
            return self._mode.from_tensor(part, static_shapes=True)  # type: ignore[arg-type]

        if isinstance(value, torch.Tensor):
            return convert(value)
        return _torch.tree_map(convert, value) if isinstance(value, (list, tuple, dict)) else value

    def _has_overrides(self) -> bool:
        kind = type(self)
        return kind is not FakeTensorProp and any(
            getattr(kind, name) is not getattr(FakeTensorProp, name) for name in OVERRIDABLE
        )

    @contextmanager
    def _enter_run(self, lazily: bool = False) -> Iterator[None]:
        """Around a run: enter the mode; at the end restore the module's tensors and global settings.

        Entering the mode costs as much as running dozens of nodes. `lazily`: it is entered by the first node that needs it.
        """
        self._entry = LazyModeEntry(self._mode)
        try:
            with self._entry, restore_settings(self):
                if not lazily:
                    self._enter_mode()
                self._check_direct_calls()
                yield
        finally:
            self._state.give_back()

    def _enter_mode(self) -> None:
        if self._entry is not None:
            self._entry.enter()

    def _check_direct_calls(self) -> None:
        """Check whether the mode can be called directly, without C++."""
        self._is_alone = _torch.is_only_mode(self._mode)
        self._grad = torch.is_grad_enabled()

    def _sweep(self, args: Iterable[object]) -> Any:
        """Run every node. Torch's own loop does the same and costs 15 µs more for each node."""
        self.env = {}
        self._odd.clear()
        self._odd_for_autograd.clear()
        self._find_writes()
        self.args_iter = iter(args)
        for node in self.graph.nodes:
            constant = self._constants.get(node.target) if node.op == "get_attr" else None
            self._record(node, self._compute(node) if constant is None else constant)
        return self.graph.process_outputs(self.env[self._output_node()])

    def _find_writes(self) -> None:
        """Find which values may be written to later: these need snapshots."""
        targets = {target_of(node) for node in self.graph.nodes}
        self._writes = any(target.writes for target in targets)
        self._moves = any(target.changes_metadata for target in targets)
        self._exposed = set(self._output_node().all_input_nodes)

    def _output_node(self) -> Node:
        return next(iter(reversed(self.graph.nodes)))

    # --- one node ----------------------------------------------------------------------------------------------

    def run_node(self, n: Node) -> Any:
        """Run one node, write its `val`, return its value."""
        try:
            value = self._rename_symbols(n, convert_to_fakes(self._mode, super().run_node(n)))
        except Exception as error:
            raise self._locate_error(error, n) from error
        self._write(n, value, is_apart=True)
        return value

    def _compute(self, node: Node) -> Any:
        """The value of a node from those of its inputs."""
        try:
            value = self._call_target(node)
            return value if self._mode.shape_env is None else self._rename_symbols(node, value)
        except Exception as error:
            raise self._locate_error(error, node) from error

    def _locate_error(self, error: Exception, node: Node) -> Exception:
        known = {other: self.env.get(other) for other in node.all_input_nodes}
        return locate_error(error, node, (fetch(node.args, known), fetch(node.kwargs, known)))

    def _call_target(self, node: Node) -> Any:
        target = target_of(node)
        if target.is_direct and self._is_alone:
            odd = self._odd_for_autograd if self._grad else self._odd
            args = direct_arguments(node.args, self.env, odd)
            kwargs = NOTHING if not node.kwargs else self._direct_kwargs(node, odd)
            if args is not None and kwargs is not None and not target.expects_lists(args):
                value = self._mode.__torch_dispatch__(node.target, (), args, kwargs)
                return list(value) if target.returns_list and type(value) is tuple else value
        self._enter_mode()
        values = fetch(node.args, self.env)
        named = fetch(node.kwargs, self.env) if node.kwargs else NOTHING
        if target.is_operator:
            operator: Any = node.target
            return operator(*values, **named)
        value = getattr(self, node.op)(node.target, values, named)
        if target.writes:
            self._check_direct_calls()  # it may have entered a mode, or enabled autocast
        return convert_to_fakes(self._mode, value)

    def _direct_kwargs(self, node: Node, odd: set[Node]) -> dict[str, object] | None:
        values = direct_arguments(node.kwargs.values(), self.env, odd)
        if values is None or type(node.kwargs.get("device")) is str:
            return None
        return dict(zip(node.kwargs, values, strict=True))

    def get_attr(self, target: Any, args: object, kwargs: object) -> object:
        value = self.fetch_attr(target)
        return self._state.borrow(value) if isinstance(value, torch.nn.Module) else value

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._state.borrow(self.fetch_attr(target))(*args, **kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in CHANGES_OF_GENERATOR:
            return None  # nothing is drawn here, and the generator of the process is not the graph's
        if not takes_graphs(target):
            return super().call_function(target, args, kwargs)
        if target is torch.ops.higher_order.invoke_subgraph:
            return self._invoke_subgraph(*args)
        return target(*wrap_subgraphs(args, self._propagate_inside), **kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(args[0], torch.Generator) and target in ("manual_seed", "set_state"):
            return args[0]
        return super().call_method(target, args, kwargs)

    def _invoke_subgraph(self, subgraph: Any, identifier: object, *operands: object) -> Any:
        if identifier in self._subgraphs.seen:
            answer = self._subgraphs.recall(self._mode, identifier, operands)
            return subgraph(*operands) if answer is None else answer
        result = self._propagate_inside(subgraph, operands)
        self._subgraphs.remember(self._mode, identifier, operands, result)
        return result

    def _propagate_inside(self, inner: GraphModule, args: tuple[object, ...]) -> Any:
        prop = FakeTensorProp(inner, self._mode, tensor_meta=self._tensor_meta, outer=self)
        prop._check_direct_calls()
        with restore_settings(prop):
            return prop._sweep(inner.graph.process_inputs(*args))

    # --- metadata -----------------------------------------------------------------------------------------

    def _rename_symbols(self, node: Node, value: object) -> object:
        """The value, with unbacked symbols replaced by those of the run before."""
        env = self._mode.shape_env
        if env is None or node.op == "placeholder":
            return value
        old = node.meta.get("unbacked_bindings") or {}
        ours = bool(old) and all(isinstance(path, KeyPath) for path in old.values())
        if ours and env.pending_fresh_unbacked_symbols:
            rebind_unbacked(env, node, value)
        bindings = compute_unbacked_bindings(env, value)
        if ours:
            return rename_symbols(self._mode, value)
        if bindings:
            node.meta["unbacked_bindings"] = bindings
        return value

    def _record(self, node: Node, value: object) -> None:
        self.env[node] = value
        has_grad, is_odd = needs_dispatch(self._mode, value)
        if has_grad or is_odd or node in self._odd_for_autograd:
            _mark(self._odd, node, is_odd)
            _mark(self._odd_for_autograd, node, is_odd or has_grad)
        is_apart = has_grad or self._writes or node in self._exposed or node.op in ENDS
        if is_apart or self._tensor_meta or type(value) is not FakeTensor:
            self._write(node, value, is_apart)
        else:
            node.meta["val"] = value

    def _write(self, node: Node, value: object, is_apart: bool) -> None:
        """Write `val`. A value that may be changed later is written as a snapshot."""
        val = val_of(value, snapshot if is_apart else return_tensor)
        if val is not None:
            node.meta["val"] = val
        elif isinstance(node.meta.get("val"), (torch.Tensor, list, tuple, dict)):
            del node.meta["val"]  # from an earlier run
        if self._tensor_meta:
            meta = tensor_meta_of(value)
            if meta is not None:
                node.meta["tensor_meta"] = meta

    @staticmethod
    def spec_of(node: Node) -> Any:
        """The spec of a node's `val`, or the same structure of specs; None if it has none."""
        return spec_of_val(node.meta.get("val"))

    # --- after an edit ---------------------------------------------------------------------------------------------

    def repropagate(self, changed: Iterable[Node]) -> list[Node]:
        """Update every `val` after these nodes were edited or inserted; returns the nodes that were run.

        Only affected nodes are run: users of a node whose specs are unchanged are not. A placeholder takes its current
        `val`. If operators change metadata in place (`t_`, `resize_`), the whole graph is run, because values depend on
        the order.
        """
        changed = list(changed)
        if not self.env:
            self._restore_values()
        targets = [target_of(node) for node in changed]
        if self._moves or any(target.changes_metadata for target in targets) or self._has_overrides():
            self._rerun()
            return list(self.graph.nodes)
        self._writes = self._writes or any(target.writes for target in targets)
        self._exposed.update(self._output_node().all_input_nodes)
        if len(self.env) > 2 * len(self.graph.nodes):
            self.env = {node: value for node, value in self.env.items() if not node._erased}
        with self._enter_run(lazily=True):
            return EditedNodes(changed).run_affected(self.env, self._compute_again, self._record)

    def _rerun(self) -> None:
        """Run the whole graph, on the inputs of the first run."""
        args: list[Any] = []
        for node in self.graph.nodes:
            if node.op == "placeholder":
                was = node.meta.get("val", self.env.get(node))
                needs_grad = getattr(self.env.get(node), "requires_grad", False)
                value = snapshot(was).requires_grad_(needs_grad) if type(was) is FakeTensor else was
                args.extend(value if str(node.target).startswith("*") else [value])
        self._convert_constants()
        with self._enter_run():
            if self._has_overrides():
                super().run(*args, enable_io_processing=False)
            else:
                self._sweep(args)

    def _restore_values(self) -> None:
        """Take the values from the `val`s of the nodes, which another object has written in the same mode."""
        self._find_writes()
        for node in self.graph.nodes:
            val = node.meta.get("val")
            if self._mode.is_our_fake(val) or (val is not None and is_complete(self._mode, val)):
                self.env[node] = val
        if not self.env:
            raise ValueError("repropagate: the nodes have no values yet; call propagate first")

    def _compute_again(self, node: Node) -> Any:
        if node.op != "placeholder":
            return self._compute(node)
        if "val" not in node.meta:
            raise locate_error(
                ValueError("expected a stand-in in meta['val'] of the new placeholder"), node, ((), {})
            )
        return convert_to_fakes(self._mode, node.meta["val"])


def own_mode(mode: Any) -> FakeTensorMode:
    """A mode of ours for the one that was given, which may be torch's own."""
    if type(mode) is FakeTensorMode or issubclass(type(mode), FakeTensorMode):
        return mode
    if not issubclass(type(mode), _torch.torch_fake_mode_class()):
        raise TypeError(f"FakeTensorProp: expected a FakeTensorMode, got a {type(mode).__name__}")
    return FakeTensorMode(
        allow_non_fake_inputs=mode.allow_non_fake_inputs,
        shape_env=None if mode.shape_env is None else ShapeEnv(),
        static_shapes=mode.static_shapes,
    )


def mode_for(module: GraphModule) -> FakeTensorMode:
    """A new mode. If the graph has unbacked symbols, the mode uses their environment."""
    for node in module.graph.nodes:
        val = node.meta.get("val")
        number = next((number for number, _ in values_in(val)), None)
        if number is not None and unbacked_symbols_in(val):
            return FakeTensorMode(shape_env=number.shape_env, static_shapes=True)
    return FakeTensorMode()


def _mark(marked: set[Node], node: Node, is_marked: bool) -> None:
    if is_marked:
        marked.add(node)
    else:
        marked.discard(node)
