"""CUDA extensions that a program compiles while it runs (`torch.utils.cpp_extension.load`): they are not built.

A rehearsal runs no kernel, and what compiled code allocates is not known. The program gets a module whose functions raise
when they are called, so that programs with another way for CPUs or old cards go on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from understudy.patching import REHEARSAL, patch_call
from understudy.simulation.library_kernels.modules import NoStandInError
from understudy.simulation.run_notes import add_note


class Extension(ModuleType):
    """Has every name, as a function."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return functools.partial(_refuse, f"{self.__name__}.{name}")


def _refuse(name: str, *args: object, **kwargs: object) -> NoReturn:
    raise NoStandInError(
        f"{name} is compiled CUDA code, and its allocations are unknown. Make it a custom operator with a fake "
        "implementation (torch.library.custom_op, register_fake), or run the program without this extension"
    )


@patch_call("torch.utils.cpp_extension._jit_compile", during=REHEARSAL)
def leave_out_compilation(
    original: Callable[..., Any], name: str, sources: Any, *args: Any, **kwargs: Any
) -> Any:
    """`load` and `load_inline` call this. Extensions for CPUs are built."""
    files = [sources] if isinstance(sources, (str, Path)) else list(sources)
    if not any(str(file).endswith((".cu", ".cuh")) for file in files):
        return original(name, sources, *args, **kwargs)
    add_note(f"the CUDA extension {name!r} was not built: its functions raise when they are called")
    return Extension(name)
