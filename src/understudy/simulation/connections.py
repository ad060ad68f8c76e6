"""Other machines, which a rehearsal does not reach: the error names the machine, and the report lists it.

In namespaces only loopback exists; these patches replace a bare error by its reason.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable
from typing import Any

from understudy.patching import REHEARSAL, patch, patch_call
from understudy.simulation.write_log import active_log, note_refused

Function = Callable[..., Any]


def _is_offline() -> bool:
    log = active_log()
    return log is not None and not log.is_online


@patch("socket.socket.connect", "socket.socket.connect_ex", during=REHEARSAL)
def refuse_connections(original: Function) -> Function:
    """A rehearsal posts nothing and downloads nothing. Connections within the machine are left alone."""

    def connect(self: Any, address: Any) -> Any:
        is_inside = self.family not in (socket.AF_INET, socket.AF_INET6) or _is_this_machine(address)
        if is_inside or not _is_offline():
            return original(self, address)
        note_refused("connect", f"{address[0]}:{address[1]}")
        raise OSError(
            errno.ENETUNREACH, "a rehearsal is offline (--online allows connections)", str(address[0])
        )

    return connect


@patch_call("socket.getaddrinfo", "socket.gethostbyname", during=REHEARSAL)
def refuse_names(original: Function, host: Any, *args: Any, **kwargs: Any) -> Any:
    """Names of other machines are not resolved: the connection is refused here, also on a machine without a name server."""
    name = host.decode("ascii", "replace") if isinstance(host, bytes) else host or ""
    is_known = _is_this_machine((name,)) or name == socket.gethostname() or _is_address(name)
    if is_known or not _is_offline():
        return original(host, *args, **kwargs)
    port = kwargs.get("port", args[0] if args else None)
    note_refused("connect", name if port is None else f"{name}:{port}")
    raise socket.gaierror(socket.EAI_NONAME, "a rehearsal is offline (--online allows connections)")


def _is_this_machine(address: object) -> bool:
    host = str(address[0]) if isinstance(address, tuple) and address else ""
    return host in ("localhost", "::1", "0.0.0.0", "") or host.startswith("127.")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
