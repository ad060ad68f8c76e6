"""System calls that Python has no functions for, by ctypes. Each raises OSError with the name of the call."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from typing import Any

CLONE_NEWNS = 0x0002_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000

MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 4096, 8192, 16384, 1 << 18
MNT_DETACH = 2

AT_FDCWD = -100
AT_RECURSIVE = 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NODEV = 1, 4

# The same numbers on every architecture.
SYS_MOUNT_SETATTR = 442
SYS_LANDLOCK_CREATE_RULESET, SYS_LANDLOCK_ADD_RULE, SYS_LANDLOCK_RESTRICT_SELF = 444, 445, 446

PR_SET_PDEATHSIG = 1
PR_CAPBSET_READ, PR_CAPBSET_DROP = 23, 24
PR_SET_NO_NEW_PRIVS = 38
PR_SET_CHILD_SUBREAPER = 36
CAPABILITY_VERSION = 0x2008_0522


@functools.cache
def libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _check(name: str, result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def unshare(flags: int) -> None:
    _check("unshare", libc().unshare(flags))


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str = "") -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    call = libc().mount
    result = call(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), os.fsencode(data) if data else None)
    _check(f"mount {kind or source} on {target}", result)


def unmount(target: str, flags: int) -> None:
    _check(f"umount {target}", libc().umount2(os.fsencode(target), flags))


def set_mount_attributes(path: str, *, set: int = 0, clear: int = 0, is_recursive: bool = False) -> None:
    """`mount_setattr`: of the mount at this path, and of all below it."""
    attributes = struct.pack("=QQQQ", set, clear, 0, 0)
    flags = AT_RECURSIVE if is_recursive else 0
    number = ctypes.c_long(SYS_MOUNT_SETATTR)
    size = ctypes.c_size_t(len(attributes))
    result = libc().syscall(number, AT_FDCWD, os.fsencode(path), ctypes.c_uint(flags), attributes, size)
    _check(f"mount_setattr {path}", result)


def set_process_attribute(option: int, value: int) -> int:
    """`prctl` with one argument."""
    zero = ctypes.c_ulong(0)
    return _check("prctl", libc().prctl(option, ctypes.c_ulong(value), zero, zero, zero))


def set_capabilities(kept: int) -> None:
    """Give up all others, for this process and for programs that it starts. `kept`: a mask of bits."""
    number = 0
    while libc().prctl(PR_CAPBSET_READ, ctypes.c_ulong(number), 0, 0, 0) >= 0:
        if not kept >> number & 1:
            set_process_attribute(PR_CAPBSET_DROP, number)
        number += 1
    header = struct.pack("=Ii", CAPABILITY_VERSION, 0)
    low, high = kept & 0xFFFF_FFFF, kept >> 32
    data = struct.pack("=IIIIII", low, low, 0, high, high, 0)
    _check("capset", libc().capset(header, data))


def create_ruleset(attributes: bytes | None, flags: int = 0) -> int:
    """`landlock_create_ruleset`: a descriptor; with flags 1, the version of the interface."""
    size = ctypes.c_size_t(len(attributes or b""))
    call = libc().syscall
    return _check(
        "landlock_create_ruleset",
        call(ctypes.c_long(SYS_LANDLOCK_CREATE_RULESET), attributes, size, ctypes.c_uint(flags)),
    )


def add_rule(ruleset: int, kind: int, rule: bytes) -> None:
    number = ctypes.c_long(SYS_LANDLOCK_ADD_RULE)
    _check("landlock_add_rule", libc().syscall(number, ruleset, kind, rule, ctypes.c_uint(0)))


def restrict_self(ruleset: int) -> None:
    number = ctypes.c_long(SYS_LANDLOCK_RESTRICT_SELF)
    _check("landlock_restrict_self", libc().syscall(number, ruleset, ctypes.c_uint(0)))
