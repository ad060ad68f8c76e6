"""Landlock: no writes outside of one folder, by this process and all that it starts. It can't be undone.

Needs version 3 of the kernel's interface (Linux 6.2): before it, files could still be emptied by `truncate`. What stays
open: chmod, chown, utime and extended attributes of files that exist, and UDP. With version 4, TCP connections to ports
below 1024 (the web, mail, ssh) are refused, too; rules are about ports, not machines.
"""

from __future__ import annotations

import os
import struct

from understudy.simulation.sandbox import system_calls as calls

LEAST_VERSION = 3
VERSION_WITH_NETWORK = 4
WRITE_FILE, TRUNCATE = 1 << 1, 1 << 14
WRITES = WRITE_FILE | TRUNCATE | sum(1 << number for number in range(4, 14))
"""Also: make and remove files, folders, links, pipes and sockets, and move them between folders."""
CONNECT_TCP = 1 << 1
PATH_BENEATH, NET_PORT = 1, 2
FIRST_FREE_PORT, LAST_PORT = 1024, 65535
WRITABLE_FILES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/tty", "/dev/ptmx")
WRITABLE_FOLDERS = ("/dev/shm", "/dev/pts")


def find_version() -> int:
    """Return the version of the kernel's Landlock interface; 0 without one."""
    try:
        return calls.create_ruleset(None, flags=1)
    except OSError:
        return 0


def restrict_writes(folder: str, is_online: bool) -> None:
    """From here on, this process writes below `folder` only. To be called before any thread starts."""
    version = find_version()
    if version < LEAST_VERSION:
        raise OSError(0, f"needs Landlock version {LEAST_VERSION}, the kernel has {version or 'none'}")
    limits_network = version >= VERSION_WITH_NETWORK and not is_online
    attributes = struct.pack("=QQ", WRITES, CONNECT_TCP) if limits_network else struct.pack("=Q", WRITES)
    ruleset = calls.create_ruleset(attributes)
    try:
        for path in (folder, *WRITABLE_FOLDERS):
            _allow(ruleset, path, WRITES)
        for path in WRITABLE_FILES:
            _allow(ruleset, path, WRITE_FILE | TRUNCATE)
        if limits_network:
            for port in range(FIRST_FREE_PORT, LAST_PORT + 1):
                calls.add_rule(ruleset, NET_PORT, struct.pack("=QQ", CONNECT_TCP, port))
        calls.set_process_attribute(calls.PR_SET_NO_NEW_PRIVS, 1)
        calls.restrict_self(ruleset)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        calls.add_rule(ruleset, PATH_BENEATH, struct.pack("=Qi", access, place))
    finally:
        os.close(place)
