"""Builds the CUDA runtime without a card for an installed build of torch: `runtime.c`, and a function that
does nothing for every other symbol of CUDA's libraries that torch refers to."""

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

_RUNTIME = Path(__file__).with_name("runtime.c")
_LIBRARIES = "cuda|cublas|cudnn|cufft|cufile|cupti|curand|cusolver|cusparse|nccl|nvrtc|nvJitLink|nvshmem"
_CUDA_LIBRARY = re.compile(rf"lib({_LIBRARIES})\w*\.so[.\d]*")
_CUDA_SYMBOL = re.compile(rf"_*(cu[A-Z]|cuFile|nvml|{_LIBRARIES})\w+")
# Opened by name at run time, so that no library of torch needs them.
_OPENED_BY_NAME = ("libcuda.so.1", "libnvidia-ml.so.1")


class NoOracle(Exception):
    """The comparison cannot be made here; the text says what is missing."""


def build_runtime(site_packages: Path, folder: Path) -> list[Path]:
    """The libraries to preload, the runtime first; `site_packages` is where the CUDA build of torch is."""
    for tool in ("gcc", "nm", "readelf"):
        if shutil.which(tool) is None:
            raise NoOracle(f"there is no {tool} to build the CUDA runtime without a card")
    torch_libraries = sorted((site_packages / "torch" / "lib").glob("lib*.so"))
    if not any(library.name == "libtorch_cuda.so" for library in torch_libraries):
        raise NoOracle(f"torch in {site_packages} is no build for CUDA")
    names = sorted(needed_libraries(torch_libraries))
    runtime_name = next(name for name in names if name.startswith("libcudart.so"))
    own, rest = folder / "runtime.o", folder / "rest.c"
    _run(
        "gcc", "-O1", "-w", "-fPIC", "-c", _RUNTIME, *_header_options(site_packages, runtime_name), "-o", own
    )
    wanted = undefined_symbols(torch_libraries) | symbols_by_name(torch_libraries)
    rest.write_text(write_rest(wanted - defined_symbols(own)))
    runtime = folder / runtime_name
    _run(
        "gcc",
        "-O1",
        "-w",
        "-fPIC",
        "-shared",
        f"-Wl,-soname,{runtime_name}",
        own,
        rest,
        "-o",
        runtime,
        "-lpthread",
    )
    return [runtime, *(_build_name(name, runtime, folder) for name in names if name != runtime_name)]


def write_rest(symbols: Iterable[str]) -> str:
    return "".join(f"long {name}() {{ return 0; }}\n" for name in sorted(symbols))


def needed_libraries(libraries: Iterable[Path]) -> set[str]:
    """CUDA's libraries by the names under which torch's own need them."""
    text = _run("readelf", "-d", *libraries)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", text)
    return {name for name in needed if _CUDA_LIBRARY.fullmatch(name)} | set(_OPENED_BY_NAME)


def undefined_symbols(libraries: Iterable[Path]) -> set[str]:
    words = (line.split() for line in _run("nm", "-D", "--undefined-only", *libraries).splitlines())
    names = {line[-1].partition("@")[0] for line in words if len(line) == 2}
    return {name for name in names if _CUDA_SYMBOL.fullmatch(name)}


def symbols_by_name(libraries: Iterable[Path]) -> set[str]:
    """Functions of NVML, which torch opens by name: their names are strings in its libraries."""
    texts = (library.read_bytes() for library in libraries if library.name == "libc10_cuda.so")
    return {name.decode() for text in texts for name in re.findall(rb"nvml[A-Z]\w+(?=\0)", text)}


def defined_symbols(binary: Path) -> set[str]:
    return {line.split()[-1] for line in _run("nm", "--defined-only", binary).splitlines()}


def _header_options(site_packages: Path, runtime_name: str) -> list[str]:
    folders = [header.parent for header in sorted(site_packages.glob("nvidia/*/include/driver_types.h"))]
    # crt/host_defines.h, which is the same for all versions, comes with triton.
    folders.append(site_packages / "triton" / "backends" / "nvidia" / "include")
    major = int(runtime_name.rpartition(".")[2])
    return [f"-DCUDA_VERSION_BUILT={major * 1000}", *(f"-I{folder}" for folder in folders)]


def _build_name(name: str, runtime: Path, folder: Path) -> Path:
    """A library of that name and nothing in it but the runtime, so that the real one is not loaded."""
    library = folder / name
    options = (
        "-shared",
        "-fPIC",
        "-Wl,--no-as-needed",
        f"-Wl,-soname,{name}",
        "-x",
        "c",
        "/dev/null",
        "-x",
        "none",
    )
    _run("gcc", *options, runtime, "-o", library)
    return library


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NoOracle(f"{command[0]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout
