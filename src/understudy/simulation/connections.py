"""Other machines, which a rehearsal does not reach: the error names the machine, and the report lists it.

In namespaces only loopback exists; these patches replace a bare error by its reason.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from understudy.lines import user_line
from understudy.patching import REHEARSAL, patch, patch_call
from understudy.simulation.libraries import when_imported
from understudy.simulation.machine import SimulationError
from understudy.simulation.offline.switch import is_made_up
from understudy.simulation.write_log import active_log, note_refused

Function = Callable[..., Any]


_address: ContextVar[str | None] = ContextVar("_address", default=None)
"""What is being downloaded."""


@patch_call("urllib.request.OpenerDirector.open", during=REHEARSAL)
def note_address(original: Function, self: object, fullurl: Any, *args: Any, **kwargs: Any) -> Any:
    """The error names the file that a program asks for, not only the machine."""
    token = _address.set(getattr(fullurl, "full_url", fullurl))
    try:
        return original(self, fullurl, *args, **kwargs)
    finally:
        _address.reset(token)


@when_imported("requests.sessions", "Session.request")
def note_request(original: Function) -> Function:
    """As urllib's."""

    def request(self: object, method: Any, url: Any, *args: Any, **kwargs: Any) -> Any:
        token = _address.set(str(url))
        try:
            return original(self, method, url, *args, **kwargs)
        finally:
            _address.reset(token)

    return request


@when_imported("torch.distributed.rpc", "init_rpc")
def refuse_remote_calls(original: Function) -> Function:
    """Calls of functions in other processes, by connections that C++ opens: there are no values to send."""

    def init_rpc(*args: object, **kwargs: object) -> Any:
        raise SimulationError(
            "torch.distributed.rpc is not supported in a rehearsal; use torch.distributed's collectives or messages, or "
            "rehearse what one worker computes without init_rpc"
        )

    return init_rpc


@when_imported("huggingface_hub.file_download", "hf_hub_download")
def name_missing_file(original: Function) -> Function:
    """A rehearsal sets `HF_HUB_OFFLINE`; the library's error asks to unset it."""

    def hf_hub_download(repo_id: str, filename: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(repo_id, filename, *args, **kwargs)
        except FileNotFoundError as error:
            if not _is_offline():
                raise
            line = user_line().partition(": ")[0] or "the program"
            text = (
                f"{line} requests {filename} of {repo_id!r}, which is not on this machine, and a rehearsal downloads "
                f"nothing: download it first (hf download {repo_id} {filename}), {_list_remedies()}"
            )
            kind: Any = type(error)
            raise kind(text) from None

    return hf_hub_download


def _list_remedies() -> str:
    if is_made_up():
        return "or allow the network with --online (--offline-data does not include it)"
    return "allow the network with --online, or let data be made up with --offline-data"


def _explain(machine: str) -> str:
    line = user_line().partition(": ")[0] or "the program"
    return (
        f"a rehearsal is offline, and {line} requests {_address.get() or machine}: save it where the program looks "
        f"for it first, {_list_remedies()}"
    )


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
        raise OSError(errno.ENETUNREACH, _explain(str(address[0])), str(address[0]))

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
    raise socket.gaierror(socket.EAI_NONAME, _explain(name))


def _is_this_machine(address: object) -> bool:
    host = str(address[0]) if isinstance(address, tuple) and address else ""
    return host in ("localhost", "::1", "0.0.0.0", "") or host.startswith("127.")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
