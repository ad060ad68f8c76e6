"""Programs of `programs.txt`, run with real tensors, with stand-ins on the CPU and on a simulated device, and with symbolic
sizes. All that can be said of what they return is the same, except for values of tensors.

A program is the text between two empty lines, and returns its last expression; one that begins with `# plain sizes only`
reads values or pickles, one with `# values of lists` reads those of a list that C++ puts on the device. `dev` is the device, `R(2, 3)` a new random
tensor there (an input, whose sizes are symbols in the symbolic run), and `exc(f, *args)` the result of a call, or its error.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import copy
import functools
import io
import itertools
import math
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracle.random_run import built_in_class
from understudy import FakeTensorMode, ShapeEnv, unset_fake_temporarily
from understudy.shapes.sizes import from_torch

PROGRAMS = [
    text for text in Path(__file__).with_name("programs.txt").read_text().split("\n\n") if text.strip()
]
PLAIN_SIZES_ONLY = "# plain sizes only"
WITH_SYMBOLS = [text for text in PROGRAMS if "R(" in text and not text.startswith(PLAIN_SIZES_ONLY)]
READS_LISTS = "# values of lists"
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
Number = Callable[[Any], Any]


@functools.cache
def lists_lose_their_values() -> bool:
    with FakeTensorMode():
        try:
            torch.zeros(1, device="cuda")[[1]]
        except IndexError:
            return False
    return True


def each_of(programs: list[str]) -> Any:
    return pytest.mark.parametrize("program", programs, ids=lambda text: " ".join(text.split())[:60])


class Raised:
    """An error: equal to one that is of the same built-in class."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Raised):
            return NotImplemented
        return any(isinstance(a.error, built_in_class(b.error)) for a, b in ((self, other), (other, self)))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self.error).__name__}: {str(self.error).splitlines()[:1]}"


class Facts:
    """What can be said of a result. `number`: what a symbolic number is."""

    def __init__(self, home: str, number: Number) -> None:
        self.home, self.number = home, number
        self.tensors: list[torch.Tensor] = []
        self.storages: list[int] = []

    def of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if isinstance(value, SYMBOLIC):
            return self.number(value)
        if isinstance(value, (list, tuple)):
            return (type(value).__name__, *map(self.of, value))
        if isinstance(value, dict):
            return {str(name): self.of(part) for name, part in value.items()}
        if isinstance(value, torch.device):
            return "home" if str(value) in (self.home, "cpu") else str(value)
        is_plain = (
            isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, Raised)) or value is None
        )
        return value if is_plain else type(value).__name__

    def _of_tensor(self, tensor: torch.Tensor) -> Any:
        for position, seen in enumerate(self.tensors):
            if seen is tensor:
                return f"tensor {position}"
        self.tensors.append(tensor)
        facts: dict[str, Any] = {
            "shape": tuple(map(self.number, tensor.shape)), "dtype": tensor.dtype, "layout": tensor.layout,
            "device": self.of(tensor.device), "requires_grad": tensor.requires_grad, "is_leaf": tensor.is_leaf,
            "is_parameter": isinstance(tensor, torch.nn.Parameter), "is_view": tensor._is_view(), "output_nr": tensor.output_nr,
            "grad_fn": None if tensor.grad_fn is None else tensor.grad_fn.name(), "is_inference": tensor.is_inference(),
            "version": None if tensor.is_inference() else tensor._version, "retains_grad": tensor.retains_grad,
        }  # fmt: skip
        if tensor.layout is torch.strided and not tensor.is_nested:
            storage = tensor.untyped_storage()._cdata
            self.storages += [] if storage in self.storages else [storage]
            facts |= {
                "stride": tuple(map(self.number, tensor.stride())), "offset": self.number(tensor.storage_offset()),
                "storage": self.storages.index(storage), "conj": tensor.is_conj(), "neg": tensor.is_neg(),
            }  # fmt: skip
        if tensor.is_leaf and tensor.grad is not None:
            facts["grad"] = self.of(tensor.grad)
            if isinstance(facts["grad"], dict):
                del facts["grad"][
                    "version"
                ]  # eager's engine adds up gradients in place, to plain tensors only
        return facts


def catch(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return Raised(error)


NAMES = {
    "torch": torch, "nn": torch.nn, "F": torch.nn.functional, "optim": torch.optim, "D": torch.distributions,
    "prm": torch.nn.utils.parametrizations, "exc": catch, "copy": copy, "io": io, "math": math, "pickle": pickle, "os": os,
    "functools": functools, "itertools": itertools, "collections": collections, "tempfile": tempfile, "warnings": warnings,
    "contextlib": contextlib,
}  # fmt: skip


def random_input(shape: tuple[int, ...], rg: bool, dtype: torch.dtype, kind: str) -> torch.Tensor:
    if kind == "bool" or not (dtype.is_floating_point or dtype.is_complex) or kind == "int":
        numbers = torch.randint(0, 2, shape)
        return numbers.bool() if kind == "bool" else numbers if kind == "int" else numbers.to(dtype)
    made = torch.randn(shape, dtype=dtype) if dtype.is_complex else torch.randn(shape).to(dtype)
    return made.requires_grad_() if rg else made


class Run:
    """One run of a program; `sizes` replaces sizes of its inputs."""

    def __init__(
        self, program: str, device: str = "cpu", mode: Any = None, sizes: dict[int, int] | None = None
    ) -> None:
        self.device, self.mode, self.sizes = device, mode, sizes or {}
        self.reals: list[torch.Tensor] = []
        tree = ast.parse(program)
        last = tree.body.pop()
        assert isinstance(last, ast.Expr), program
        names = {**NAMES, "dev": device, "R": self._make_input}
        torch.manual_seed(0)
        try:
            with mode or contextlib.nullcontext(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(compile(tree, "<program>", "exec"), names)
                self.result = eval(compile(ast.Expression(last.value), "<program>", "eval"), names)
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)

    def _make_input(
        self, *shape: int, rg: bool = False, dtype: torch.dtype = torch.float32, kind: str = ""
    ) -> Any:
        shape = tuple(self.sizes.get(size, size) for size in shape)
        is_symbolic = self.mode is not None and self.mode.shape_env is not None
        with unset_fake_temporarily() if is_symbolic else contextlib.nullcontext():
            made = random_input(shape, rg and (is_symbolic or self.device == "cpu"), dtype, kind)
            self.reals.append(made)
            if is_symbolic:
                return self.mode.from_tensor(made, source=f"x{len(self.reals)}")
        moved = made if self.device == "cpu" else made.to(self.device)
        return moved.requires_grad_() if rg else moved

    def facts(self, number: Number = lambda value: value) -> Any:
        return Facts(self.device, number).of(self.result)


@each_of(PROGRAMS)
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_program_on_stand_ins(program: str, device: str) -> None:
    if device != "cpu" and READS_LISTS in program and lists_lose_their_values():
        pytest.skip(
            "C++ hands on a list of indices on a device that is not here without its values (torch 2.15)"
        )
    assert Run(program, device, FakeTensorMode()).facts() == Run(program).facts()


@each_of(WITH_SYMBOLS)
def test_a_program_with_symbolic_sizes(program: str) -> None:
    """The answers hold at the example's sizes, and at all others that the guards admit."""
    env = ShapeEnv()
    symbolic = Run(program, mode=FakeTensorMode(shape_env=env))
    example = Run(program)
    assert (
        symbolic.facts(lambda size: size.node.hint if isinstance(size, SYMBOLIC) else size) == example.facts()
    )
    numbers = sorted({size for real in symbolic.reals for size in real.shape if size > 1})
    for other in [{size: size + 1} for size in numbers] + [{size: size * 2 for size in numbers}]:
        inputs = [
            torch.zeros([other.get(size, size) for size in real.shape], dtype=real.dtype)
            for real in symbolic.reals
        ]
        if env.check(*inputs):
            continue
        named = {str(symbol): value for symbol, value in env.bind_symbols(None, *inputs).items()}
        sizes = {symbol: named[symbol.name] for symbol in env.hints if symbol.name in named}

        def number_there(size: Any, sizes: Any = sizes) -> Any:
            return int(from_torch(size).value.evaluate(sizes)) if isinstance(size, SYMBOLIC) else size

        assert symbolic.facts(number_there) == Run(program, sizes=other).facts(), other
