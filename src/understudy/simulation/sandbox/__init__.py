"""sandbox: what keeps a rehearsed script from changing files, by the kernel where it can. Pure standard library.

    running          `run_sandboxed`: a function in a child process, in the strongest sandbox that this machine has
    namespaces       overlayfs, a private /dev and /proc, no network: user, mount, PID, IPC and network namespaces
    landlock         no writes outside of one folder, and no connections to well-known ports
    supervision      waits for a child, and forwards signals to it
    written_files    what was written, read off the upper layers of overlayfs
    private_folders  temporary folders that the next run removes where this one is killed
    system_calls     unshare, mount, capset, landlock_* and others, by ctypes

    result = run_sandboxed(function, SandboxOptions())       # `function(sandbox)` returns bytes
    result.data, result.exit_code, result.sandbox.level, result.writes

Code inside may fork as many processes as it likes: they share the sandbox, and end with it.
"""

from understudy.simulation.sandbox.running import (
    LANDLOCK,
    NAMESPACES,
    NO_SANDBOX,
    PYTHON,
    Sandbox,
    SandboxOptions,
    SandboxResult,
    run_sandboxed,
)

__all__ = [
    "LANDLOCK",
    "NAMESPACES",
    "NO_SANDBOX",
    "PYTHON",
    "Sandbox",
    "SandboxOptions",
    "SandboxResult",
    "run_sandboxed",
]
