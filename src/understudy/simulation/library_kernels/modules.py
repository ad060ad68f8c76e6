"""Stand-in modules for packages that cannot be installed without a GPU.

A package that is not installed, and whose import would fail, is answered by functions of our own with the same names. The
names that are not known can be imported, too; a call of one of them is an error that says so.

    STAND_INS["flash_attn"]      its version, and its modules: name → public names
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from understudy import _torch
from understudy.errors import UnderstudyError
from understudy.simulation.run_notes import add_note

Names = Mapping[str, Any]
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


class NoStandInError(UnderstudyError, RuntimeError):
    """A name of a package that is not installed, or of a CUDA extension that was not built, and has no stand-in."""


@dataclass(frozen=True)
class StandIn:
    version: str
    modules: Callable[[], Mapping[str, Names]]
    """The public names of each module and their values, by the module's full name."""
    answer: Callable[[str], Any]
    """The value of any other name of its modules."""
    for_installed_packages: bool = True
    """Whether packages that look for it, and do without it, find it, too: those that only use it when asked to."""


def refuse(name: str) -> Any:
    """A class, so that it can be a base class, too."""
    package = name.partition(".")[0]

    def __init__(self: object, *args: object, **kwargs: object) -> None:
        raise NoStandInError(
            f"{name} is not supported without {package}, which is not installed. Install {package}, "
            f"or rehearse without {name}"
        )

    return type(name.rpartition(".")[2], (), {"__init__": __init__, "__module__": package})


class _StandInLoader(importlib.abc.Loader):
    def __init__(self, stand_in: StandIn, modules: Mapping[str, Names]) -> None:
        self._stand_in, self._modules = stand_in, modules

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__

        def __getattr__(attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
            if f"{name}.{attribute}" in self._modules:
                return importlib.import_module(f"{name}.{attribute}")
            return self._stand_in.answer(f"{name}.{attribute}")

        vars(module).update(self._modules[name], __version__=self._stand_in.version, __getattr__=__getattr__)
        if "." not in name:
            add_note(
                f"{name} is not installed: stand-ins of its kernels ran, with the memory of version {module.__version__}"
            )


class _Distribution(importlib.metadata.Distribution):
    """The metadata for `importlib.metadata`: packages read the version."""

    def __init__(self, name: str, version: str) -> None:
        self._files = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "top_level.txt": f"{name}\n",
        }

    def read_text(self, filename: str) -> str | None:
        return self._files.get(filename)

    def locate_file(self, path: Any) -> Any:
        return path


class _StandInFinder(importlib.abc.MetaPathFinder):
    """The last finder: only for modules that no other has found."""

    def __init__(self, stand_ins: Mapping[str, StandIn]) -> None:
        self._stand_ins = stand_ins

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package = name.partition(".")[0]
        stand_in = self._stand_ins.get(package)
        if stand_in is None or not (stand_in.for_installed_packages or _asks_for_program()):
            return None
        modules = stand_in.modules()
        if name not in modules:
            return None
        is_package = any(other.startswith(f"{name}.") for other in modules)
        return importlib.util.spec_from_loader(name, _StandInLoader(stand_in, modules), is_package=is_package)

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        wanted = getattr(context, "name", None)
        for name, stand_in in self._stand_ins.items():
            if stand_in.for_installed_packages and (
                wanted is None or wanted.replace("-", "_").lower() == name
            ):
                yield _Distribution(name, stand_in.version)


def is_stand_in_module(name: str) -> bool:
    """Whether this module is loaded, and is one of ours."""
    module = sys.modules.get(name)
    return module is not None and isinstance(getattr(module.__spec__, "loader", None), _StandInLoader)


def _asks_for_program() -> bool:
    """Whether the import statement is the program's own, not that of an installed package."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (
        "importlib" in frame.f_code.co_filename or frame.f_code.co_filename == __file__
    ):
        frame = frame.f_back
    return not any(part in frame.f_code.co_filename for part in INSTALLED)


@contextmanager
def offer_stand_ins(stand_ins: Mapping[str, StandIn]) -> Iterator[None]:
    """For packages that are not installed; afterwards, none of their modules is left."""
    missing = {
        name: stand_in
        for name, stand_in in stand_ins.items()
        if name not in sys.modules and importlib.util.find_spec(name) is None
    }
    _torch.has_triton()  # torch remembers the answer: it would compile with Triton, and a stand-in is not for that
    finder = _StandInFinder(missing)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in missing]:
            if is_stand_in_module(name):
                del sys.modules[name]
