"""Triton: kernels are not run. A launch writes to its tensors, and allocates nothing.

Where the package is installed, only launches are replaced; elsewhere its decorators and names are stand-ins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from understudy.simulation.libraries import when_imported
from understudy.simulation.library_kernels.launches import launch_kernel
from understudy.simulation.library_kernels.modules import Names, StandIn
from understudy.simulation.run_notes import add_note

VERSION = "3.5.0"
NOTE = "kernels in Triton are not run: they allocate nothing, and take the time of moving their tensors once"


class TritonKernel:
    """kernel[grid](x, y, n, BLOCK=128)"""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        functools.update_wrapper(self, function)

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.run

    def run(self, *args: object, **kwargs: object) -> None:
        _launch(args, kwargs)

    def warmup(self, *args: object, **kwargs: object) -> None:
        """Compiles, and launches nothing."""

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError(
            f"expected a launch {self.fn.__name__}[grid](...) of a Triton kernel, got a plain call"
        )


def _launch(args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    add_note(NOTE)
    launch_kernel((*args, *kwargs.values()))


def jit(function: Callable[..., Any] | None = None, **settings: object) -> Any:
    return TritonKernel if function is None else TritonKernel(function)


def _decorate(*args: object, **settings: object) -> Callable[[Any], Any]:
    """`triton.autotune(...)`, `triton.heuristics(...)`: which settings are best is not asked."""
    return lambda kernel: kernel


class Config:
    def __init__(self, kwargs: dict[str, Any], *args: object, **settings: object) -> None:
        self.kwargs = kwargs
        vars(self).update(settings)


def cdiv(x: int, y: int) -> int:
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


class Name:
    """A name of the language, where it stands outside of kernels: an annotation, a default, a dtype."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Name:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Name(f"{self._name}.{attribute}")

    def __call__(self, *args: object, **kwargs: object) -> object:
        """`tl.constexpr(4)` is its value; a function of the language is itself a kernel's."""
        return args[0] if args else self

    def __repr__(self) -> str:
        return self._name


def make_modules() -> Mapping[str, Names]:
    names = {
        "jit": jit, "autotune": _decorate, "heuristics": _decorate, "Config": Config, "cdiv": cdiv,
        "next_power_of_2": next_power_of_2, "JITFunction": TritonKernel,
    }  # fmt: skip
    language: Names = {"cdiv": cdiv}
    return {
        "triton": names,
        "triton.language": language,
        "triton.language.math": {},
        "triton.language.extra": {},
        "triton.language.extra.libdevice": {},
        "triton.language.extra.cuda": {},
        "triton.language.extra.cuda.libdevice": {},
        "triton.runtime": names,
        "triton.runtime.jit": names,
        "triton.runtime.autotuner": names,
        "triton.testing": {},
        "triton.tools": {},
        "triton.tools.tensor_descriptor": {},
    }


TRITON = StandIn(VERSION, make_modules, Name, for_installed_packages=False)


@when_imported("triton.runtime.jit", "JITFunction.run")
def launch_installed_kernel(original: Callable[..., Any]) -> Callable[..., Any]:
    """Its driver would look for a GPU."""

    def run(self: object, *args: object, grid: object = None, warmup: bool = False, **kwargs: object) -> None:
        if not warmup:
            _launch(args, kwargs)

    return run


@when_imported("triton.runtime.autotuner", "Autotuner.run", "Heuristics.run")
def launch_without_tuning(original: Callable[..., Any]) -> Callable[..., Any]:
    """The settings of a kernel are found by timing it."""

    def run(self: object, *args: object, **kwargs: object) -> None:
        _launch(args, {name: value for name, value in kwargs.items() if not isinstance(value, FunctionType)})

    return run
