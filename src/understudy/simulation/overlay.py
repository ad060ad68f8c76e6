"""Redirect writes of a program to a temporary folder, from which its later reads are served.

    with Overlay() as overlay:
        open("model.pt", "wb")          # a file of the overlay; an existing real file is unchanged
        shutil.rmtree("checkpoints")    # deleted for the program only
    overlay.writes                      # the files that would have been written

For machines without namespaces (`sandbox`). Covered is what goes through Python: `open`, functions of `os`, and all that is
built on them (`shutil`, `pathlib`, NumPy, JSON, logs). Libraries that open files in C++ or Rust are redirected one by one
(`libraries`); under Landlock, what is not redirected fails.
"""

from __future__ import annotations

import errno
import glob
import os
import pathlib
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from understudy.patching import FILE_OVERLAY, patch, patch_call
from understudy.simulation.sandbox.private_folders import make_private_folder
from understudy.simulation.write_log import Write, WriteLog

Function = Callable[..., Any]
REAL = ("/dev/", "/proc/", "/sys/")
"""Devices, not files: writes to them are not stored."""


@dataclass
class Overlay:
    """The folder, the deleted paths, and the list of writes. Paths are absolute, links resolved in their parents.
    `parent`: where the folder is made, the temporary one by default."""

    parent: str | None = None
    log: WriteLog = field(default_factory=WriteLog)
    root: str = ""
    current: str | None = None
    """The working folder, as the program knows it, if it is one that only the overlay has."""
    _deleted: set[str] = field(default_factory=set)
    _folder: Any = None
    _tempdir: str | None = None
    _busy: Any = field(default_factory=threading.local)

    def __enter__(self) -> Overlay:
        self._folder = ExitStack()
        self.root = os.path.realpath(self._folder.enter_context(make_private_folder(self.parent)))
        self._folder.enter_context(self.log)
        os.mkdir(os.path.join(self.root, "tmp"))
        # Temporary files of the program are real ones, in a folder that goes away.
        self._tempdir, tempfile.tempdir = tempfile.tempdir, os.path.join(self.root, "tmp")
        _active.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _active.remove(self)
        tempfile.tempdir = self._tempdir
        # torch's compiler keeps the folder of its cache in a variable, which later programs inherit.
        for name in [name for name, value in os.environ.items() if value.startswith(self.root)]:
            del os.environ[name]
        self._folder.close()

    @property
    def writes(self) -> list[Write]:
        return self.log.entries

    def note(self, what: str, target: str) -> None:
        self.log.note(what, target)

    # --- where a path is -----------------------------------------------------------------------------------

    def absolute(self, path: Any) -> str | None:
        """Return the absolute path with links resolved; None if it is not a file of the real disk."""
        if isinstance(path, int):
            return None
        text = os.fsdecode(os.fspath(path))
        folder, name = os.path.split(os.path.abspath(text))
        whole = os.path.join(os.path.realpath(folder), name) if name else folder
        is_ours = whole == self.root or whole.startswith(self.root + os.sep)
        return None if is_ours or whole.startswith(REAL) else whole

    def inside(self, whole: str) -> str:
        return os.path.join(self.root, "files", whole.lstrip(os.sep))

    def is_deleted(self, whole: str) -> bool:
        """Whether the file, or a folder that contains it, was deleted and not written again."""
        if not self._deleted or os.path.lexists(self.inside(whole)):
            return False
        part = whole
        while part not in self._deleted:
            parent = os.path.dirname(part)
            if parent == part:
                return False
            part = parent
        return True

    def find(self, path: object) -> Any:
        """The path to read from."""
        whole = self.absolute(path)
        if whole is None:
            return path
        if os.path.lexists(self.inside(whole)):
            return self.inside(whole)
        if self.is_deleted(whole):
            return os.path.join(self.root, "deleted", whole.lstrip(os.sep))
        return path if self.current is None else whole

    def place(self, path: object, *, keeps: bool = False) -> Any:
        """The path to write to. `keeps`: the content of the file is copied first."""
        whole = self.absolute(path)
        if whole is None:
            return path
        inside = self.inside(whole)
        self._make_parents(whole)
        if keeps and not os.path.lexists(inside) and not self.is_deleted(whole) and os.path.isfile(whole):
            shutil.copyfile(whole, inside)
        self._deleted.discard(whole)
        return inside

    def _make_parents(self, whole: str) -> None:
        parent = os.path.dirname(whole)
        if not os.path.isdir(self.inside(parent)):
            if self.is_deleted(parent) or not os.path.isdir(parent):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), parent)
            os.makedirs(self.inside(parent), exist_ok=True)

    def names(self, whole: str) -> set[str]:
        """The names in a folder."""
        found: set[str] = set()
        if not self.is_deleted(whole) and whole not in self._deleted and os.path.isdir(whole):
            found |= {name for name in os.listdir(whole) if not self.is_deleted(os.path.join(whole, name))}
        if os.path.isdir(self.inside(whole)):
            found |= set(os.listdir(self.inside(whole)))
        return found

    def is_folder(self, whole: str) -> bool:
        return os.path.isdir(self.inside(whole)) or (os.path.isdir(whole) and not self.is_deleted(whole))

    def exists(self, whole: str) -> bool:
        return os.path.lexists(self.inside(whole)) or (os.path.lexists(whole) and not self.is_deleted(whole))

    # --- what programs do ----------------------------------------------------------------------------------

    def remove(self, path: object) -> None:
        whole = self._existing(path)
        self.note("remove", whole)
        inside = self.inside(whole)
        if os.path.isdir(inside) and not os.path.islink(inside):
            os.rmdir(inside)
        elif os.path.lexists(inside):
            os.unlink(inside)
        self._deleted.add(whole)

    def remove_folder(self, path: Any) -> None:
        whole = self._existing(path)
        if self.names(whole):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), os.fspath(path))
        self.remove(path)

    def make_folder(self, path: Any) -> None:
        whole = self.absolute(path)
        assert whole is not None
        if self.exists(whole):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path))
        self.note("mkdir", whole)
        was_deleted = os.path.lexists(whole)
        os.mkdir(self.place(path))
        if was_deleted:  # a new, empty folder: entries of the real one stay deleted
            self._deleted.update(os.path.join(whole, name) for name in os.listdir(whole))

    def find_folder(self, path: Any) -> tuple[Any, str | None]:
        """Where to go if a program changes to this folder, and its name, if it is not on the real disk."""
        whole = self.absolute(path)
        if whole is None:
            return path, None
        if os.path.isdir(whole) and not self.is_deleted(whole):
            return whole, None
        if not self.is_folder(whole):
            code = errno.ENOTDIR if self.exists(whole) else errno.ENOENT
            raise OSError(code, os.strerror(code), os.fspath(path))
        return self.inside(whole), whole

    def move(self, source: object, target: object) -> None:
        """A folder is moved with all that is in it."""
        whole = self._existing(source)
        self.note("rename", f"{whole} → {self.absolute(target) or target}")
        self._copy(whole, self.place(target))
        shutil.rmtree(self.inside(whole), ignore_errors=True)
        if os.path.lexists(self.inside(whole)):
            os.unlink(self.inside(whole))
        self._deleted.add(whole)

    def _copy(self, whole: str, target: str) -> None:
        if not self.is_folder(whole):
            shutil.copyfile(self.find(whole), target)
            return
        os.makedirs(target, exist_ok=True)
        for name in self.names(whole):
            self._copy(os.path.join(whole, name), os.path.join(target, name))

    def _existing(self, path: Any) -> str:
        whole = self.absolute(path)
        if whole is None or not self.exists(whole):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        return whole

    # --- its own work sees the real disk ----------------------------------------------------------------------

    def run(self, function: Function, *args: object, **kwargs: object) -> Any:
        self._busy.depth = getattr(self._busy, "depth", 0) + 1
        try:
            return function(*args, **kwargs)
        finally:
            self._busy.depth -= 1

    @property
    def is_busy(self) -> bool:
        return getattr(self._busy, "depth", 0) > 0


_active: list[Overlay] = []


def active_overlay() -> Overlay | None:
    """The overlay of the running program; None while the overlay itself works on files."""
    return _active[-1] if _active and not _active[-1].is_busy else None


# --- patches ---------------------------------------------------------------------------------------------------------

WRITING = frozenset("wax+")


def _of_pathlib(*names: str) -> list[str]:
    """`pathlib` of Python 3.10 keeps functions of `os` and `io` as attributes of one object, which does not see that
    they are replaced elsewhere. Later Pythons have no such object."""
    return [f"pathlib._normal_accessor.{name}" for name in names if hasattr(pathlib, "_normal_accessor")]


@patch_call(
    "builtins.open",
    "io.open",
    "bz2._builtin_open",
    "tarfile.bltn_open",
    *_of_pathlib("open"),
    during=FILE_OVERLAY,
)
def open_in_overlay(
    original: Function, file: object, mode: str = "r", *args: object, **kwargs: object
) -> Any:
    """What a rehearsal writes goes to its overlay, and is read from there."""
    overlay = active_overlay()
    if overlay is None or isinstance(file, int) or kwargs.get("opener") is not None:
        return original(file, mode, *args, **kwargs)
    return original(overlay.run(place_for, overlay, file, mode), mode, *args, **kwargs)


def place_for(overlay: Overlay, file: Any, mode: str) -> Any:
    """The path with which a file is opened."""
    if not WRITING & set(mode):
        return overlay.find(file)
    whole = overlay.absolute(file)
    if whole is None:
        return file
    if overlay.is_folder(whole):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(file))
    if "x" in mode and overlay.exists(whole):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(file))
    if mode[0] == "r" and not overlay.exists(whole):
        return overlay.find(file)
    overlay.note("write", whole)
    return overlay.place(file, keeps="w" not in mode)


@patch_call("os.open", during=FILE_OVERLAY)
def open_descriptor_in_overlay(
    original: Function, path: object, flags: int, mode: int = 0o777, *, dir_fd: object = None
) -> int:
    """As `open`: `tempfile` and `pathlib` use it."""
    overlay = active_overlay()
    if overlay is None or dir_fd is not None:
        return original(path, flags, mode, dir_fd=dir_fd)
    is_written = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    text = ("x" if flags & os.O_EXCL else "w" if flags & os.O_TRUNC else "a") if is_written else "r"
    return original(overlay.run(place_for, overlay, path, text), flags, mode)


@patch_call(
    "os.stat", "os.lstat", "os.access", "os.readlink", "os.listxattr", "os.getxattr", "os.statvfs",
    *_of_pathlib("stat", "readlink"), during=FILE_OVERLAY,
)  # fmt: skip
def look_into_overlay(original: Function, path: object, *args: object, **kwargs: object) -> Any:
    """Questions about a file (existence, size, times) are answered from the overlay first."""
    overlay = active_overlay()
    if overlay is None or isinstance(path, int) or kwargs.get("dir_fd") is not None:
        return original(path, *args, **kwargs)
    return original(overlay.run(overlay.find, path), *args, **kwargs)


@patch_call("os.chdir", during=FILE_OVERLAY)
def change_folder(original: Function, path: Any) -> None:
    """A program may go to a folder that it has made."""
    overlay = active_overlay()
    if overlay is None or isinstance(path, int):
        original(path)
        return
    found, current = overlay.run(overlay.find_folder, path)
    original(found)
    overlay.current = current


@patch_call("os.getcwd", during=FILE_OVERLAY)
def current_folder(original: Function) -> str:
    """Return the working folder of the program; the overlay itself uses it as well."""
    return (_active[-1].current if _active else None) or original()


@patch_call("os.listdir", *_of_pathlib("listdir"), during=FILE_OVERLAY)
def list_overlay(original: Function, path: object = ".") -> Any:
    """A folder lists the real files and those of the overlay, without the deleted ones."""
    overlay = active_overlay()
    whole = None if overlay is None else overlay.run(overlay.absolute, path)
    if overlay is None or whole is None or not overlay.run(overlay.is_folder, whole):
        return original(path if overlay is None else overlay.run(overlay.find, path))
    names = sorted(overlay.run(overlay.names, whole))
    return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names


class _Entries(list[Any]):
    """The iterator that `os.scandir` returns."""

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def __next__(self) -> Any:
        if not self:
            raise StopIteration
        return self.pop(0)

    def __iter__(self) -> Iterator[Any]:
        return self

    def close(self) -> None: ...


class _Entry:
    """An `os.DirEntry` with the path that the program knows; size and kind are looked up in the overlay when asked for."""

    def __init__(self, folder: Any, name: str) -> None:
        self.name, self.path = name, os.path.join(folder, name)

    def __fspath__(self) -> Any:
        return self.path

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self.path) and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self.path) and (follow_symlinks or not self.is_symlink())

    def is_symlink(self) -> bool:
        return os.path.islink(self.path)

    def stat(self, *, follow_symlinks: bool = True) -> Any:
        return os.stat(self.path) if follow_symlinks else os.lstat(self.path)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino


@patch_call("os.scandir", *_of_pathlib("scandir"), during=FILE_OVERLAY)
def scan_overlay(original: Function, path: Any = ".") -> Any:
    """As `os.listdir`."""
    overlay = active_overlay()
    whole = None if overlay is None or isinstance(path, (int, bytes)) else overlay.run(overlay.absolute, path)
    if overlay is None or whole is None or not overlay.run(overlay.is_folder, whole):
        return original(path)
    return _Entries(_Entry(os.fspath(path), name) for name in sorted(overlay.run(overlay.names, whole)))


def _of_globber(name: str) -> list[str]:
    """`Path.glob` of Python 3.13 keeps functions of `os` as static methods of a class."""
    kept = getattr(getattr(glob, "_StringGlobber", None), name, None)
    return [f"glob._StringGlobber.{name}"] if kept is getattr(os, name) else []


@patch_call(*_of_globber("scandir"), during=FILE_OVERLAY)
def scan_overlay_for_pattern(original: Function, globber: object, path: Any) -> Any:
    """As `os.listdir`."""
    return scan_overlay(original, path)


@patch_call(*_of_globber("lstat"), during=FILE_OVERLAY)
def look_into_overlay_for_pattern(original: Function, globber: object, path: object) -> Any:
    """As `os.lstat`."""
    return look_into_overlay(original, path)


def _redirect(original: Function, method: str) -> Function:
    def call(path: object, *args: object, **kwargs: object) -> Any:
        overlay = active_overlay()
        if overlay is None or kwargs.get("dir_fd") is not None or overlay.run(overlay.absolute, path) is None:
            return original(path, *args, **kwargs)
        return overlay.run(getattr(overlay, method), path)

    return call


@patch("os.remove", "os.unlink", *_of_pathlib("unlink"), during=FILE_OVERLAY)
def remove_in_overlay(original: Function) -> Function:
    """The file is marked as deleted in the overlay; the real one stays."""
    return _redirect(original, "remove")


@patch("os.rmdir", *_of_pathlib("rmdir"), during=FILE_OVERLAY)
def remove_folder_in_overlay(original: Function) -> Function:
    """As `os.remove`."""
    return _redirect(original, "remove_folder")


@patch("os.mkdir", *_of_pathlib("mkdir"), during=FILE_OVERLAY)
def make_folder_in_overlay(original: Function) -> Function:
    """The folder is made in the overlay only."""
    return _redirect(original, "make_folder")


@patch_call("os.rename", "os.replace", *_of_pathlib("rename", "replace"), during=FILE_OVERLAY)
def move_in_overlay(original: Function, source: object, target: object, **kwargs: object) -> Any:
    """Files are moved in the overlay only."""
    overlay = active_overlay()
    if overlay is None:
        return original(source, target, **kwargs)
    is_real = [overlay.run(overlay.absolute, path) is not None for path in (source, target)]
    return overlay.run(overlay.move, source, target) if any(is_real) else original(source, target)


@patch_call("os.symlink", "os.link", *_of_pathlib("symlink", "link"), during=FILE_OVERLAY)
def link_in_overlay(
    original: Function, source: object, target: object, *args: object, **kwargs: object
) -> Any:
    """A link becomes a copy, or is made inside of the overlay."""
    overlay = active_overlay()
    if overlay is None or overlay.run(overlay.absolute, target) is None:
        return original(source, target, *args, **kwargs)
    overlay.run(overlay.note, "link", overlay.run(overlay.absolute, target))
    place = overlay.run(overlay.place, target)
    return overlay.run(os.symlink, overlay.run(overlay.find, source), place)


@patch_call("os.chmod", "os.utime", "os.truncate", "os.setxattr", *_of_pathlib("chmod"), during=FILE_OVERLAY)
def change_in_overlay(original: Function, path: object, *args: object, **kwargs: object) -> Any:
    """Rights, times and sizes of files are changed in a copy."""
    overlay = active_overlay()
    if overlay is None or isinstance(path, int) or overlay.run(overlay.absolute, path) is None:
        return original(path, *args, **kwargs)
    whole = overlay.run(overlay.absolute, path)
    if overlay.run(overlay.is_folder, whole):
        return None
    return overlay.run(original, overlay.run(overlay.place, path, keeps=True), *args, **kwargs)


@patch_call("shutil.rmtree", during=FILE_OVERLAY)
def remove_tree_in_overlay(
    original: Function, path: Any, ignore_errors: bool = False, onerror: object = None, **kwargs: object
) -> None:
    """`shutil.rmtree` works with descriptors of folders, which the overlay does not follow: the tree is marked as
    deleted."""
    overlay = active_overlay()
    whole = None if overlay is None else overlay.run(overlay.absolute, path)
    if overlay is None or whole is None:
        original(path, ignore_errors, onerror, **kwargs)
    elif overlay.run(overlay.is_folder, whole):
        overlay.run(overlay.note, "rmtree", whole)
        overlay.run(shutil.rmtree, overlay.inside(whole), ignore_errors=True)
        overlay._deleted.add(whole)
    elif not ignore_errors:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))


# --- files that are opened in C++


def redirect_path(original: Function, position: int, name: str, what: str) -> Function:
    """Call it with a path of the overlay."""

    def call(*args: object, **kwargs: object) -> Any:
        overlay = active_overlay()
        path = args[position] if len(args) > position else kwargs.get(name)
        if overlay is None or not isinstance(path, (str, os.PathLike)):
            return original(*args, **kwargs)
        whole = overlay.run(overlay.absolute, path)
        if whole is None:
            return original(*args, **kwargs)
        if what == "read":
            place = overlay.run(overlay.find, path)
        else:
            overlay.run(overlay.note, what, whole)
            place = overlay.run(overlay.place, path)
        place = os.fspath(place)
        if len(args) > position:
            return original(*args[:position], place, *args[position + 1 :], **kwargs)
        return original(*args, **{**kwargs, name: place})

    return call


@patch("torch.save", "torch.jit.save", "torch.jit._script.RecursiveScriptModule.save", during=FILE_OVERLAY)
def save_in_overlay(original: Function) -> Function:
    """C++ writes the file."""
    return redirect_path(original, 1, "f", "torch.save")


@patch("torch.load", "torch.jit.load", during=FILE_OVERLAY)
def load_from_overlay(original: Function) -> Function:
    """C++ reads the file."""
    return redirect_path(original, 0, "f", "read")


@patch("torch.autograd.profiler.profile.export_chrome_trace", during=FILE_OVERLAY)
def save_trace_in_overlay(original: Function) -> Function:
    """C++ writes the file."""
    return redirect_path(original, 1, "path", "trace")
