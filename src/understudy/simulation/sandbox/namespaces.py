"""User, mount, PID, IPC and network namespaces: every write of every process goes to overlayfs.

    /home, /tmp, /usr …   one overlay for each top folder without mounts below it; others are overlaid folder by folder
    all else              read-only
    /dev                  null, zero, random, terminals; a private /dev/shm. No disks
    /proc                 that of the PID namespace
    network               loopback only, unless it was asked for

The upper layers are in a tmpfs with a limit, or in a folder of the user's choice. They can't be reached by path inside.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

from understudy.simulation.sandbox import system_calls as calls
from understudy.simulation.sandbox.written_files import OverlayLayer

STAGING = "/proc"
"""Where the upper layers are mounted while the sandbox is built: the new /proc covers it."""
NOT_OVERLAID = frozenset({"/proc", "/sys", "/dev"})
KERNEL_SETTINGS = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs")
"""Settings of the whole machine: read-only, also for root."""
MOST_ENTRIES = 200
"""Maximum number of entries of a folder that are examined."""
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
DEVICE_LINKS = {
    "ptmx": "pts/ptmx",
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}
KEPT_CAPABILITIES = sum(1 << number for number in (0, 1, 3, 4, 5, 6, 7, 10))
"""Capabilities that root keeps: chown, dac_override, fowner, fsetid, kill, setgid, setuid, net_bind_service. None
that changes mounts."""
SIOCSIFFLAGS = 0x8914
IFF_UP_RUNNING = 0x41


@dataclass
class Tree:
    """The file system inside. `read_only`: folders that overlayfs refused."""

    layers: list[OverlayLayer] = field(default_factory=list)
    read_only: list[str] = field(default_factory=list)


def enter_namespaces(is_online: bool) -> None:
    """Move this process into new namespaces; the PID namespace applies to its children."""
    network = 0 if is_online else calls.CLONE_NEWNET
    calls.unshare(calls.CLONE_NEWUSER | calls.CLONE_NEWNS | calls.CLONE_NEWPID | calls.CLONE_NEWIPC | network)


def write_maps(process: int) -> None:
    """User and group numbers inside are those outside: all that a privileged user may map, else one's own."""
    whole = {kind: _read_own_map(kind) for kind in ("uid", "gid")}
    try:
        for kind, ranges in whole.items():
            _write_map(process, kind, ranges)
    except OSError:
        with open(f"/proc/{process}/setgroups", "w") as file:
            file.write("deny")
        for kind, number in (("uid", os.geteuid()), ("gid", os.getegid())):
            _write_map(process, kind, [(number, 1)])


def find_foreign_file(folder: str) -> str | None:
    """The folder, or a file or folder in it, that this user may write, but that belongs to another user or group: these
    have no number inside, and overlayfs can't copy such files. Root has numbers for all, and a top folder is not copied."""
    if os.geteuid() == 0 or os.path.dirname(folder) == "/":
        return None
    entries = [folder]
    for place in (folder, *_list_folders(folder)):
        with suppress(OSError), os.scandir(place) as found:
            entries += [entry.path for entry in islice(found, MOST_ENTRIES)]
    own = os.geteuid(), os.getegid()
    for path in entries:
        with suppress(OSError):
            about = os.lstat(path)
            is_foreign = (about.st_uid, about.st_gid) != own
            if is_foreign and not stat.S_ISLNK(about.st_mode) and os.access(path, os.W_OK):
                return path
    return None


def _read_own_map(kind: str) -> list[tuple[int, int]]:
    with open(f"/proc/self/{kind}_map") as file:
        lines = [line.split() for line in file]
    return [(int(first), int(count)) for first, _, count in lines]


def _write_map(process: int, kind: str, ranges: Iterable[tuple[int, int]]) -> None:
    # The kernel takes a map in one write.
    file = os.open(f"/proc/{process}/{kind}_map", os.O_WRONLY)
    try:
        os.write(file, "".join(f"{first} {first} {count}\n" for first, count in ranges).encode())
    finally:
        os.close(file)


# --- files -----------------------------------------------------------------------------------------------------------


def build_tree(size: int, scratch: str | None) -> Tree:
    """To be called by the first process of the namespaces. `size`: of the tmpfs; `scratch`: a folder instead of it."""
    current = os.getcwd()
    targets = list_targets(_read_mount_points(), scratch)
    calls.mount("none", "/", None, calls.MS_REC | calls.MS_PRIVATE)
    calls.set_mount_attributes("/", set=calls.MOUNT_ATTR_RDONLY | calls.MOUNT_ATTR_NODEV, is_recursive=True)
    if scratch is None:
        calls.mount("tmpfs", STAGING, "tmpfs", calls.MS_NOSUID | calls.MS_NODEV, f"size={size},mode=700")
    else:
        calls.mount(scratch, STAGING, None, calls.MS_BIND)
        calls.set_mount_attributes(STAGING, clear=calls.MOUNT_ATTR_RDONLY)
    os.setxattr(STAGING, "user.understudy", b"y")  # overlayfs marks folders in this way
    os.mkdir(f"{STAGING}/dev")
    tree = Tree()
    for number, target in enumerate(targets):
        _overlay(target, f"{STAGING}/{number}", tree)
    if not tree.layers:
        raise OSError(0, f"overlayfs refuses every folder, such as {', '.join(tree.read_only[:3])}")
    _build_devices(f"{STAGING}/dev", size)
    calls.mount(f"{STAGING}/dev", "/dev", None, calls.MS_MOVE)
    calls.unmount(STAGING, calls.MNT_DETACH)
    calls.mount("proc", "/proc", "proc", calls.MS_NOSUID | calls.MS_NODEV | calls.MS_NOEXEC)
    for name in filter(os.path.exists, KERNEL_SETTINGS):
        calls.mount(name, name, None, calls.MS_BIND)
        calls.set_mount_attributes(name, set=calls.MOUNT_ATTR_RDONLY)
    os.chdir(current)
    return tree


def list_targets(mount_points: Iterable[str], scratch: str | None = None) -> list[str]:
    """Folders to overlay. One with mounts below it can't be, nor one with the upper layers in it: its folders are."""
    held = [point for point in mount_points if point not in NOT_OVERLAID]
    held += [os.path.join(scratch, "")] if scratch is not None else []

    def visit(folder: str) -> Iterator[str]:
        for entry in _list_folders(folder):
            if entry in NOT_OVERLAID:
                continue
            if any(point.startswith(entry + "/") for point in held):
                yield from visit(entry)
            else:
                yield entry

    return list(visit("/"))


def _list_folders(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:  # no rights
        return []


def _read_mount_points() -> list[str]:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        points = [line.split(" ")[4] for line in file]
    return [re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), point) for point in points]


def _overlay(target: str, place: str, tree: Tree) -> None:
    upper, work = f"{place}/upper", f"{place}/work"
    lower_folder = os.open(target, os.O_PATH | os.O_DIRECTORY)
    try:
        about = os.stat(target)
        for folder in (place, upper, work):
            os.mkdir(folder)
        _copy_attributes(about, upper)
        lower = re.sub(r"([\\:,])", r"\\\1", target)
        calls.mount(
            "overlay", target, "overlay", 0, f"lowerdir={lower},upperdir={upper},workdir={work},userxattr"
        )
    except OSError:
        os.close(lower_folder)
        tree.read_only.append(target)
        return
    tree.layers.append(OverlayLayer(os.open(upper, os.O_RDONLY | os.O_DIRECTORY), lower_folder, target))


def _copy_attributes(about: os.stat_result, folder: str) -> None:
    """The root of an overlay has the rights and times of its upper layer."""
    with suppress(OSError):  # the owner may have no id in this namespace
        os.chown(folder, about.st_uid, about.st_gid)
    os.chmod(folder, stat.S_IMODE(about.st_mode))
    os.utime(folder, ns=(about.st_atime_ns, about.st_mtime_ns))


def _build_devices(folder: str, size: int) -> None:
    calls.mount("tmpfs", folder, "tmpfs", calls.MS_NOSUID, "size=1m,mode=755")
    for name in DEVICES:
        if os.path.exists(f"/dev/{name}"):
            os.close(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
            calls.mount(f"/dev/{name}", f"{folder}/{name}", None, calls.MS_BIND)
            calls.set_mount_attributes(f"{folder}/{name}", clear=calls.MOUNT_ATTR_NODEV)
    for name in ("pts", "shm"):
        os.mkdir(f"{folder}/{name}")
    calls.mount(
        "devpts",
        f"{folder}/pts",
        "devpts",
        calls.MS_NOSUID | calls.MS_NOEXEC,
        "newinstance,ptmxmode=666,mode=620",
    )
    for name, target in DEVICE_LINKS.items():
        os.symlink(target, f"{folder}/{name}")
    calls.mount("tmpfs", f"{folder}/shm", "tmpfs", calls.MS_NOSUID | calls.MS_NODEV, f"size={size},mode=1777")


# --- the rest --------------------------------------------------------------------------------------------------------


def start_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP_RUNNING))


def give_up_privileges() -> None:
    """A process inside can't change mounts, nor can a program that it starts."""
    calls.set_process_attribute(calls.PR_SET_NO_NEW_PRIVS, 1)
    calls.set_capabilities(KEPT_CAPABILITIES if os.geteuid() == 0 else 0)
