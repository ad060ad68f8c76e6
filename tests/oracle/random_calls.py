"""Random programs of operators: the samples of torch's database, changed at random, one working on results of another.

    vocabulary = Vocabulary(seed, block)        a few operators; all programs of a block are made of them
    program = vocabulary.new_program(number)
    step = program.next_step()                  operator, variant, arguments: new inputs, or values of the program so far
    program.run(step, program.real)             runs it on a list of values, and appends its results to that list

A program is named by seed and number, and can be made again. What is changed in a sample: dtypes, sizes (0 and 1 among
them), layouts in memory (permuted, with gaps, expanded, overlapping), which arguments share memory, `requires_grad`,
numbers, and the tensors that are given as `out=`; and the contexts around a program. Beside the operators of the database
there is what programs do otherwise (`everyday_calls.py`); between two steps, a program may take a view of a value, and at its
end, gradients of one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.testing._internal import common_methods_invocations as database
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tests.oracle.cases import OPS, duplicate, seed
from tests.oracle.compare import tensors_in
from tests.oracle.everyday_calls import EVERYDAY, GRADIENTS, VIEWS

CALLS: dict[str, Any] = {**OPS, **{name: call for name, call in EVERYDAY.items() if name != GRADIENTS}}
OPERATORS_IN_A_BLOCK = 6
PROGRAMS_IN_A_BLOCK = 150
LENGTHS = (1,) * 6 + (2,) * 2 + (3,) * 2 + (5, 8)
SAMPLES_READ, SAMPLES_KEPT = 40, 10
MOST_ELEMENTS = 20_000
LARGE = (2**62, 2**63 - 1, -(2**63))

DTYPES: tuple[torch.dtype, ...] = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
COMMON = (torch.float32,) * 4 + (
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float64,
    torch.bfloat16,
    torch.int32,
)

VARIANTS = ("function", "function", "method", "inplace", "inplace", "out", "out", "backward")
"Drawn from these; an operator that lacks one is called as a function."

UNSAFE = frozenset({
    "_segment_reduce.offsets", "_segment_reduce.lengths", "lu_unpack", "lu_solve", "linalg.lu_solve", "linalg.ldl_solve",
    "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "nn.functional.pdist", "ormqr",
    "linalg.householder_product", "nn.functional.embedding_bag", "nn.functional.ctc_loss", "to_sparse", "sparse.mm_reduce",
    "sparse.sampled_addmm", "torch.ops.aten._safe_softmax.default", "nn.functional.max_unpool1d", "nn.functional.max_unpool2d",
    "nn.functional.max_unpool3d", "nn.functional.max_unpool1d.grad", "nn.functional.max_unpool2d.grad",
    "nn.functional.max_unpool3d.grad", "tril", "triu", "narrow_copy",
})  # fmt: skip
"""Operators whose kernels read or write beyond memory that is too short, or where values tell them to: their samples are
taken as they are, but for dtypes and the order in memory."""
NEEDS_OWN_OUT = frozenset({"nn.functional.avg_pool3d", "linalg.eigh", "linalg.eigvalsh"})
"""Eager takes the memory of out= for its own: it writes beyond that of a tensor which overlaps itself, or which is also
read, and no longer has the size that it had."""
NEVER_ENDS = frozenset({("linalg.matrix_power", -(2**63)), ("matrix_power", -(2**63))})
"Eager does not come back: it takes the inverse and changes the sign of the least integer, which is itself, over and over."
VALUES_FROM_NOWHERE = frozenset({
    "grid_sampler_2d",  # by a mode that there is none of
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_", "resize_as_",
    "linalg.lstsq", "linalg.lstsq.grad_oriented", "nn.functional.embedding_bag", "uniform", "as_strided", "as_strided_copy",
    "as_strided.partial_views", "linalg.ldl_factor_ex", "geqrf",
    "nn.functional.pad.circular",
})  # fmt: skip
"""Operators whose results hold values that nobody has computed, in a changed sample if not in the database's."""


class Slot(NamedTuple):
    """In the place of a tensor among the arguments: the value of the program with this number."""

    number: int


@dataclass(frozen=True)
class Step:
    """One call, with slots for its tensors."""

    op: str
    dtype: torch.dtype
    variant: str
    edits: tuple[str, ...]
    arguments: Any = field(repr=False)
    process: Callable[[Any], Any] = field(repr=False)
    "The part of the result that gradients are taken of."
    context: str = ""

    def filled(self, values: Sequence[Any]) -> Any:
        """Its arguments and keyword arguments, with these values in the slots."""
        return _fill(self.arguments, values)

    def run(self, values: Sequence[Any]) -> Any:
        args, kwargs = self.filled(values)
        with CONTEXTS[self.context]() if self.context else nullcontext():
            result = call_of(self.op, self.variant)(*args, **kwargs)
            return (
                self._gradients(result, tensors_in((args, kwargs))) if self.variant == "backward" else result
            )

    def _gradients(self, result: Any, tensors: list[torch.Tensor]) -> Any:
        leaves = [tensor for tensor in tensors if tensor.requires_grad]
        outputs = [tensor for tensor in tensors_in(self.process(result)) if tensor.requires_grad]
        if not leaves or not outputs:
            return result
        return torch.autograd.grad(
            outputs, leaves, [torch.ones_like(output) for output in outputs], allow_unused=True
        )

    def slots(self) -> list[int]:
        leaves = tree_flatten(self.arguments, is_leaf=lambda leaf: isinstance(leaf, Slot))[0]
        return [leaf.number for leaf in leaves if isinstance(leaf, Slot)]


@contextmanager
def _float64_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
    "float64 by default": _float64_by_default,
}
"Around all steps of a program, each by itself."


def _fill(tree: Any, values: Sequence[Any]) -> Any:
    kind = type(tree)
    if kind is Slot:
        return values[tree.number]
    if kind is tuple or kind is list:
        return kind([_fill(part, values) for part in tree])
    if kind is dict:
        return {key: _fill(part, values) for key, part in tree.items()}
    if isinstance(tree, (tuple, dict)):  # torch.Size, named tuples, ordered dicts
        return tree_map(lambda leaf: _fill(leaf, values), tree, is_leaf=lambda leaf: type(leaf) is Slot)
    return tree


def call_of(op: str, variant: str) -> Callable[..., Any]:
    """What is called, by its name, as programs do: a patched function is found by it."""
    info = EVERYDAY[op] if op == GRADIENTS else CALLS[op]
    call = info.op
    if variant == "method" and info.method_variant is not None:
        call = info.method_variant
    if variant == "inplace" and info.inplace_variant is not None:
        call = info.inplace_variant
    home, name = NAMED.get(id(call), (None, ""))
    return call if home is None else getattr(home, name)  # type: ignore[no-any-return]


NAMED = {
    id(getattr(home, name)): (home, name)
    for home in (torch, torch.Tensor, torch.nn.functional)
    for name in dir(home)
    if callable(getattr(home, name, None)) and not isinstance(getattr(home, name), type)
}


class Vocabulary:
    """The operators of a block of programs, with samples to change."""

    def __init__(self, seed_number: int, block: int, operators: Sequence[str] | None = None) -> None:
        self.seed = seed_number
        self.block = block
        names = sorted(operators if operators is not None else CALLS)
        # Each round goes through all operators once, in an order of its own: so all are met equally often.
        in_round = -(-len(names) // OPERATORS_IN_A_BLOCK)
        random.Random(f"{seed_number}/round/{block // in_round}").shuffle(names)
        start = (block % in_round) * OPERATORS_IN_A_BLOCK
        self.operators = names[start : start + OPERATORS_IN_A_BLOCK]
        self._samples: dict[tuple[str, torch.dtype], list[Any]] = {}

    def new_program(self, number: int) -> Program:
        return Program(self, random.Random(f"{self.seed}/{self.block}/{number}"))

    def sample(self, rng: random.Random, op: str, dtype: torch.dtype) -> Any:
        key = (op, dtype)
        if key not in self._samples:
            self._samples[key] = self._read(op, dtype)
        found = self._samples[key]
        return rng.choice(found) if found else None

    def _read(self, op: str, dtype: torch.dtype) -> list[Any]:
        samples = _usable_samples(op, dtype)
        return random.Random(f"{self.seed}/{self.block}/{op}/{dtype}").sample(
            samples, min(SAMPLES_KEPT, len(samples))
        )

    def dtype_for(self, rng: random.Random, op: str) -> torch.dtype:
        supported = CALLS[op].supported_dtypes("cpu")
        return rng.choice([d for d in (*DTYPES, *COMMON, *COMMON) if d in supported] or [torch.float32])


@cache
def _usable_samples(op: str, dtype: torch.dtype) -> list[Any]:
    """Read once for all blocks: making them takes longer than running them."""
    seed()
    info = CALLS[op]
    try:
        samples = list(islice(info.sample_inputs_func(info, "cpu", dtype, False), SAMPLES_READ))
    except Exception:  # the database has no samples of this dtype
        return []
    return [each for each in samples if _is_usable((each.input, each.args, each.kwargs))]


def _is_usable(tree: Any) -> bool:
    tensors = tensors_in(tree)
    return sum(tensor.numel() for tensor in tensors) <= MOST_ELEMENTS and all(
        tensor.layout == torch.strided and not tensor.is_quantized for tensor in tensors
    )


class Program:
    """A program that grows step by step, and the values of a real run of it."""

    def __init__(self, vocabulary: Vocabulary, rng: random.Random) -> None:
        self._vocabulary = vocabulary
        self.rng = rng
        self.inputs: dict[int, torch.Tensor] = {}
        "The tensors that it is given, by the number of their slot: as they are before it runs."
        self.real: list[Any] = []
        self.steps: list[Step] = []
        self.length = rng.choice(LENGTHS)
        self.context = rng.choice(tuple(CONTEXTS)) if rng.random() < 0.25 else ""

    def next_step(self) -> Step | None:
        """A step that was not run yet; its new inputs are in `inputs`, with a slot each. None if there is no sample."""
        if self.steps:
            step = self._gradient_step() if len(self.steps) == self.length - 1 else self._view_step()
            if step is not None:
                return step
        op = self.rng.choice(self._vocabulary.operators)
        dtype = self._vocabulary.dtype_for(self.rng, op)
        sample = self._vocabulary.sample(self.rng, op, dtype)
        if sample is None:
            return None
        variant = self._variant(op)
        editor = Editor(self.rng, op, variant, ((sample.input, *sample.args), dict(sample.kwargs)))
        editor.edit()
        if variant == "out" and not editor.add_out():
            variant = "function"
        process = sample.output_process_fn_grad if variant == "backward" else _whole
        arguments = self._with_slots(editor)
        return Step(op, dtype, variant, tuple(editor.edits), arguments, process, self.context)

    def _view_step(self) -> Step | None:
        """Sometimes, a view of a value of the program, for later steps to read and write."""
        numbers = [
            number for number, value in enumerate(self.real) if isinstance(value, torch.Tensor) and value.ndim
        ]
        if not numbers or self.rng.random() < 0.7:
            return None
        return self._step_of(self.rng.choice(tuple(VIEWS)), self.rng.choice(numbers))

    def _gradient_step(self) -> Step | None:
        """Sometimes, gradients of the last value that has some, by all inputs that want one."""
        tensors = {number: value for number, value in enumerate(self.real) if isinstance(value, torch.Tensor)}
        try:
            are_leaves = {number: value.is_leaf for number, value in tensors.items() if value.requires_grad}
        except RuntimeError:  # a view from no_grad whose base was written to since
            return None
        leaves = [number for number, is_leaf in are_leaves.items() if is_leaf]
        results = [number for number, is_leaf in are_leaves.items() if not is_leaf]
        if not leaves or not results or self.rng.random() < 0.3:
            return None
        return self._step_of(GRADIENTS, results[-1], *leaves)

    def _step_of(self, op: str, *numbers: int) -> Step:
        arguments = (tuple(map(Slot, numbers)), {})
        return Step(op, self.real[numbers[0]].dtype, "function", (), arguments, _whole, self.context)

    def _variant(self, op: str) -> str:
        variant = self.rng.choice(VARIANTS)
        info = CALLS[op]
        lacks = {
            "method": info.method_variant is None,
            "inplace": info.inplace_variant is None,
            "out": not info.supports_out or isinstance(info, database.ForeachFuncInfo),
            "backward": not info.supports_autograd or op in UNSAFE or self.context == "inference_mode",
        }
        return "function" if lacks.get(variant) else variant

    def _with_slots(self, editor: Editor) -> Any:
        slots: dict[int, Slot] = {}
        given = [number for number, value in enumerate(self.real) if isinstance(value, torch.Tensor)]
        made = duplicate(editor.tensors)
        leaves = list(editor.leaves)
        needs_own = editor.op in UNSAFE or (editor.variant == "out" and editor.op in NEEDS_OWN_OUT)
        for position, tensor in zip(editor.positions, made, strict=True):
            if given and not needs_own and self.rng.random() < 0.4:
                number = self._alike(given, tensor)
                editor.edits.append("value of the program")
                leaves[position] = Slot(number)
                continue
            if id(tensor) not in slots:
                slots[id(tensor)] = Slot(len(self.real))
                self.inputs[len(self.real)] = tensor
                self.real.append(None)
            leaves[position] = slots[id(tensor)]
        fresh = [number for number, value in enumerate(self.real) if value is None and number in self.inputs]
        for number, tensor in zip(fresh, duplicate([self.inputs[number] for number in fresh]), strict=True):
            self.real[number] = tensor.data.requires_grad_(
                tensor.requires_grad
            )  # a version counter that starts at 0
        return tree_unflatten(leaves, editor.structure)

    def _alike(self, given: list[int], tensor: torch.Tensor) -> int:
        """A value of the program, if possible of this shape and dtype."""
        for test in (
            lambda value: value.shape == tensor.shape and value.dtype == tensor.dtype,
            lambda value: value.ndim == tensor.ndim and value.dtype == tensor.dtype,
        ):
            alike = [number for number in given if test(self.real[number])]
            if alike:
                return self.rng.choice(alike)
        return self.rng.choice(given)

    @staticmethod
    def append_results(result: Any, values: list[Any]) -> None:
        values.extend(tensor for tensor in tensors_in(result) if tensor.layout == torch.strided)


def _whole(result: Any) -> Any:
    return result


class Editor:
    """The arguments of a sample, while they are changed."""

    def __init__(self, rng: random.Random, op: str, variant: str, arguments: Any) -> None:
        self.rng = rng
        self.op = op
        self.variant = variant
        self.leaves, self.structure = tree_flatten(arguments)
        self.edits: list[str] = []
        self._find_tensors()

    def _find_tensors(self) -> None:
        self.positions = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors: list[torch.Tensor] = [self.leaves[i] for i in self.positions]

    def edit(self) -> None:
        rng = self.rng
        safe = self.op not in UNSAFE
        if safe and rng.random() < 0.25:
            self._change_size()
        if safe and rng.random() < 0.06:
            self._change_rank()
        if rng.random() < 0.2:
            self._change_dtype()
        for number in range(len(self.tensors)):
            if rng.random() < 0.3:
                self._change_layout(number, self._layouts())
        if safe and len(self.tensors) > 1 and rng.random() < 0.15:
            self._share_memory()
        if safe and rng.random() < 0.15:
            self._change_number()
        self._require_gradients()

    def _layouts(self) -> dict[str, Layout]:
        return {name: LAYOUTS[name] for name in ("permuted", "gaps")} if self.op in UNSAFE else LAYOUTS

    def _change_size(self) -> None:
        """One size becomes another, in all tensors that have it, or in one."""
        sizes = sorted({size for tensor in self.tensors for size in tensor.shape})
        if not sizes:
            return
        old, new = self.rng.choice(sizes), self.rng.choice((0, 1, 1, 2, 3, 5))
        everywhere = self.rng.random() < 0.8
        chosen = range(len(self.tensors)) if everywhere else [self.rng.randrange(len(self.tensors))]
        for number in chosen:
            tensor = self.tensors[number]
            if old in tensor.shape:
                self.tensors[number] = with_shape(
                    tensor, [new if size == old else size for size in tensor.shape]
                )
        self.edits.append(f"size {old} -> {new}{'' if everywhere else ' in one'}")

    def _change_rank(self) -> None:
        number = self.rng.randrange(len(self.tensors)) if self.tensors else None
        if number is None:
            return
        tensor = self.tensors[number]
        shapes = [(), (1, *tensor.shape), tensor.shape[1:], (*tensor.shape, 1), (1,)]
        self.tensors[number] = with_shape(tensor, list(self.rng.choice(shapes)))
        self.edits.append("another rank")

    def _change_dtype(self) -> None:
        if not self.tensors:
            return
        to = self.rng.choice((*DTYPES, *COMMON))
        chosen = self.rng.choice(self.tensors)
        alone = self.rng.random() < 0.5
        for number, tensor in enumerate(self.tensors):
            if tensor is chosen or (not alone and tensor.dtype is chosen.dtype):
                self.tensors[number] = tensor.detach().resolve_conj().resolve_neg().to(to)
        self.edits.append(f"{'one' if alone else 'all'} {to}".replace("torch.", ""))

    def _change_layout(self, number: int, layouts: dict[str, Layout]) -> None:
        name = self.rng.choice(tuple(layouts))
        self.tensors[number] = layouts[name](
            self.tensors[number].detach().resolve_conj().resolve_neg(), self.rng
        )
        self.edits.append(name)

    def _share_memory(self) -> None:
        taker, giver = self.rng.sample(range(len(self.tensors)), 2)
        shared = self.tensors[giver]
        if self.rng.random() < 0.5 and shared.numel() >= self.tensors[taker].numel():
            shape = self.tensors[taker].shape
            flat = shared.detach().reshape(-1)
            shared = flat[: self.tensors[taker].numel()].view(shape)
        self.tensors[taker] = shared
        self.edits.append("shared")

    def _change_number(self) -> None:
        numbers = [
            i
            for i, leaf in enumerate(self.leaves)
            if isinstance(leaf, (int, float)) and not isinstance(leaf, bool)
        ]
        if not numbers:
            return
        position = self.rng.choice(numbers)
        old = self.leaves[position]
        others: list[Any] = [old + 1, old - 1, -old, 0, 1, 2, -1, 2.5, True]
        if self.rng.random() < 0.1:
            others = list(LARGE)
        new = self.rng.choice(others)
        if (self.op, new) in NEVER_ENDS:
            return
        self.leaves[position] = new
        self.edits.append(f"number {old} -> {new}")

    def _require_gradients(self) -> None:
        likely = 1.0 if self.variant == "backward" else 0.1
        for number, tensor in enumerate(self.tensors):
            if (tensor.is_floating_point() or tensor.is_complex()) and self.rng.random() < likely:
                # As a view of a leaf would: the memory stays what it is.
                self.tensors[number] = tensor.detach().requires_grad_()

    def arguments(self) -> Any:
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, duplicate(self.tensors), strict=True):
            leaves[position] = tensor
        return tree_unflatten(leaves, self.structure)

    def add_out(self) -> bool:
        """`out=` as the results are, or changed, or one of the inputs; False if there is no result to tell."""
        args, kwargs = self.arguments()
        try:
            with torch.no_grad():
                result = CALLS[self.op].op(*args, **kwargs)
        except Exception:
            return False
        tensors = tensors_in(result)
        if not tensors or not _is_usable(result):
            return False
        kinds = ("like", "like", "empty", "other size", "other dtype", "layout", "input", "offset")
        taboo = ("layout", "input") if self.op in NEEDS_OWN_OUT else ("layout",) if self.op in UNSAFE else ()
        kind = self.rng.choice([kind for kind in kinds if kind not in taboo])
        self.edits.append(f"out {kind}")
        out = tree_map(lambda leaf: self._out(leaf, kind) if isinstance(leaf, torch.Tensor) else leaf, result)
        leaves, structure = tree_flatten((args, {**kwargs, "out": out}))
        originals = iter(self.tensors)
        seen = {id(tensor): next(originals) for tensor in tensors_in((args, kwargs))}
        self.leaves = [seen.get(id(leaf), leaf) for leaf in leaves]
        self.structure = structure
        self._find_tensors()
        return True

    def _out(self, result: torch.Tensor, kind: str) -> torch.Tensor:
        like = torch.zeros_like(result.detach())
        match kind:
            case "empty":
                return torch.empty(0, dtype=result.dtype)
            case "other size":
                return torch.zeros([size + 1 for size in result.shape] or [2], dtype=result.dtype)
            case "other dtype":
                return like.to(self.rng.choice(DTYPES))
            case "layout":
                return with_room(self.rng.choice(tuple(self._layouts().values()))(like, self.rng))
            case "input" if self.tensors:
                return self.rng.choice(self.tensors).detach()
            case "offset":
                return torch.zeros(like.numel() + 3, dtype=like.dtype)[3:]
        return like


# --- layouts ----------------------------------------------------------------------------------------------------

Layout = Callable[[torch.Tensor, random.Random], torch.Tensor]


def with_shape(tensor: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Another shape, with the values of the tensor over and over."""
    made = torch.zeros(shape, dtype=tensor.dtype)
    values = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if made.numel() and values.numel():
        made.copy_(values[torch.arange(made.numel()) % values.numel()].reshape(shape))
    return made


def permuted(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    order = list(range(tensor.ndim))
    rng.shuffle(order)
    back = [order.index(dim) for dim in range(tensor.ndim)]
    return tensor.permute(order).contiguous().permute(back)


def gaps(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    if tensor.ndim == 0:
        return torch.stack([tensor, tensor])[1]
    dim = rng.randrange(tensor.ndim)
    return torch.stack([tensor, tensor], dim + 1).select(dim + 1, 1)


def offset(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    longer = torch.zeros(tensor.numel() + 2, dtype=tensor.dtype)
    longer[2:] = tensor.reshape(-1)
    return longer[2:].view(tensor.shape)


def expanded(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    if tensor.ndim == 0:
        return tensor
    dim = rng.randrange(tensor.ndim)
    if tensor.shape[dim] == 0:
        return with_shape(tensor, [1 if i == dim else n for i, n in enumerate(tensor.shape)]).expand(
            tensor.shape
        )
    return tensor.narrow(dim, 0, 1).contiguous().expand(tensor.shape)


def overlapping(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """Several elements share a place in memory, though no stride is 0."""
    strides = [rng.choice((1, 1, 2, 3)) for _ in tensor.shape]
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, strides, strict=True) if size)
    return with_shape(tensor, [max(extent, 1)]).as_strided(tensor.shape, strides)


def channels_last(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    if tensor.ndim == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return (
        tensor.contiguous(memory_format=torch.channels_last_3d) if tensor.ndim == 5 else permuted(tensor, rng)
    )


def odd_strides(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """Strides of sizes 0 and 1, which nobody uses, say something else than usual."""
    strides = [
        rng.choice((0, 1, 7)) if size < 2 else step
        for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    return (
        tensor.as_strided(tensor.shape, strides)
        if tensor.numel()
        else tensor.new_empty(0).as_strided(tensor.shape, strides)
    )


def with_room(tensor: torch.Tensor) -> torch.Tensor:
    """The same in memory for all its elements: some kernels write one after the other into `out=` that overlaps itself."""
    needed = tensor.storage_offset() + tensor.numel()
    if tensor.untyped_storage().nbytes() >= needed * tensor.element_size():
        return tensor
    return torch.zeros(needed, dtype=tensor.dtype).as_strided(
        tensor.shape, tensor.stride(), tensor.storage_offset()
    )


LAYOUTS: dict[str, Layout] = {
    "permuted": permuted,
    "gaps": gaps,
    "offset": offset,
    "expanded": expanded,
    "overlapping": overlapping,
    "channels last": channels_last,
    "odd strides": odd_strides,
}
