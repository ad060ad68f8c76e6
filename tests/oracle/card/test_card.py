"""The parts of the comparison that need no build for CUDA; the comparison itself is a command (docs/accuracy.md)."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import understudy
from tests.oracle.card.__main__ import main
from tests.oracle.card.build import (
    NoOracle,
    build_runtime,
    needed_libraries,
    symbols_by_name,
    undefined_symbols,
    write_rest,
)
from tests.oracle.card.cases_operators import operator_cases
from tests.oracle.card.compare import compare_case, write_table
from tests.oracle.card.record import record_case

needs_compiler = pytest.mark.skipif(
    not all(map(shutil.which, ("gcc", "nm", "readelf"))), reason="needs gcc and binutils"
)


def record(
    *events: str, allocated: int = 1024, reserved: int = 2 << 20, error: str | None = None
) -> dict[str, Any]:
    lines = [f"train.py:{number}" for number in range(len(events))]
    return {
        "events": list(events),
        "lines": lines,
        "allocated": allocated,
        "reserved": reserved,
        "retries": 0,
        "error": error,
    }


@pytest.mark.parametrize(
    ("real", "simulated", "judged"),
    [
        (("+512", "+1024", "-512"), ("+512", "+1024", "-512"), "same"),
        (("+512", "-512", "+1024"), ("+512", "+1024", "-512"), "same requests"),
        (("+512", "+1024"), ("+1024", "+512"), "other order"),
        (("+512", "+1024"), ("+512",), "different"),
    ],
)
def test_events_are_judged(real: tuple[str, ...], simulated: tuple[str, ...], judged: str) -> None:
    assert compare_case("step", record(*real), record(*simulated)).events == judged


def test_table_has_differences_and_counts() -> None:
    same = compare_case("same", record("+512"), record("+512"))
    other = compare_case(
        "other",
        record("+512", "+64"),
        record("+512", allocated=2048, error="OutOfMemoryError: no"),
        verbose=True,
    )
    table = write_table([same, other], verbose=True)
    assert "same: events same; allocated equal; reserved equal" in table
    assert (
        "other: events different; allocated 1,024 real, 2,048 simulated (+100.00%); reserved equal" in table
    )
    assert "    simulated: OutOfMemoryError: no" in table
    assert "    train.py:1  real +64 | simulated " in table
    assert table.endswith("allocated in 1, reserved in 2.")
    assert "same: events" not in write_table([same, other])


def test_a_simulated_case_is_recorded() -> None:
    cases = dict(operator_cases())
    with understudy.simulate("h100"):
        recorded = record_case(cases["silu, torch.float32"])
    assert recorded["events"][:2] == [f"+{4 * 128 * 256 * 4}"] * 2
    assert recorded["error"] is None


# The events of torch 2.13.0+cu130, as `python -m tests.oracle.card` records them.
RECORDED = {
    "dropout, torch.bfloat16, backward":
        "+262144 +131072 +262144 +262144 +262144 -131072 -262144 -262144 -262144 -262144",
    "embedding_bag, torch.float32":
        "+256000 +6400 +800 +800 +6400 +25600 -6400 -800 -6400 -800 -256000 -25600",
    "logsumexp, torch.float32":
        "+4000000 +4000 +4000 +1000 -1000 -4000 +4000000 +4000 -4000000 -4000 -4000000 -4000",
    "bce with logits, torch.float32":
        "+4000000 +4000000 +4000000 +4000000 +4 +492 +4 -4 -492 -4000000 -4000000 -4000000 -4000000 -4",
    "isinf":
        "+4000000 +4000000 +1000000 -4000000 +1 +123 +4 -4 -123 -1000000 -4000000 -1",
    "embedding, many, torch.bfloat16, backward":
        "+2560000 +65536 +4194304 +4194304 +65536 +65536 +65536 +137727 -137727 -65536 +2560000 +65536 +8 +65536 +1279 -1279 "
        "-65536 +40000 +40000 +1279 -1279 +8 +46552 +5958656 -5958656 -46552 -8 -40000 -40000 -8 -65536 -65536 -65536 -65536 "
        "-4194304 -2560000 -2560000 -4194304",
    "layer_norm of a transpose, torch.float32":
        "+102400 +256 +256 +102400 +102400 +1600 +1600 -102400 -1600 -1600 -256 -256 -102400 -102400",
    "layer_norm, many rows, torch.float32, backward":
        "+131072000 +1024 +1024 +131072000 +512000 +512000 +131072000 +131072000 +1024 +1024 +4096000 +4096000"
        " +1024 +8257536 +8 -8 -8257536 -1024 +1024 +8257536 +8 -8 -8257536 -1024 -4096000 -4096000 -512000 -512000 -131072000 -1024 -1024 -1024 -1024 -131072000 -131072000 -131072000",
    "roll of two, torch.float32":
        "+6400 +6400 +6400 -6400 -6400 -6400",
    "embedding of a slice, torch.float32":
        "+5120000 +4128 +4096 +524288 -4096 -4128 -5120000 -524288",
    "index, two broadcast, torch.float32":
        "+5120000 +1024 +128 +16384 +16384 +8192 -16384 -16384 -128 -1024 -5120000 -8192",
    "powers of a number, torch.float32":
        "+25600 +25600 +25600 +8 -8 -25600 -25600 -25600",
    "huber_loss, torch.float32":
        "+4000000 +4000000 +4000000 +4 +492 +4 -4 -492 -4000000 -4000000 -4000000 -4",
    "embedding by frequency, torch.float32, backward":
        "+256000 +6400 +204800 +204800 +6400 +6400 +6400 +1 -1 -6400 +6400 +1279 -1279 +1279 -1279 +256000 +6400 +8 +6400 +1279 "
        "-1279 -6400 +6400 +6400 +1279 -1279 +8 +7040 +225280 -225280 -7040 -8 -6400 -6400 -8 -6400 -6400 -6400 -6400 -6400 "
        "-204800 -256000 -256000 -204800",
    "embedding_bag, torch.float32, backward":
        "+256000 +6400 +800 +800 +6400 +25600 +25600 +6400 +6400 +6400 +1 -1 -6400 +256000 +6400 +8 +6400 +1279 -1279 -6400 +6400 "
        "+6400 +1279 -1279 +8 +7040 +225280 -225280 -7040 -8 -6400 -6400 -8 -6400 -6400 -6400 -6400 -800 -6400 -800 -25600 "
        "-256000 -256000 -25600",
    "max, torch.float32, backward":
        "+4096000 +4 +500 +4 -4 -500 +4 +1024000 +1 +1024000 +8 +8192000 +1000 +4 -4 -1000 -8192000 +4 +4096000 -4 -8 -1024000 -1 -1024000 -4 -4096000 -4096000 -4",
    "mish, torch.float32, backward":
        "+4096000 +4096000 +4096000 +4096000 -4096000 -4096000 -4096000 -4096000",
    "index_select by a slice, torch.float32":
        "+131072 +4800 +307200 -4800 -131072 -307200",
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_requests_come_in_the_order_of_torch(name: str) -> None:
    """Masks before results, results after what they are computed from: which hole a request takes depends on it."""
    run = dict(operator_cases())[name]
    with understudy.simulate("h100"):
        recorded = record_case(run)
    events, expected = recorded["events"], RECORDED[name].split()
    last = max(number for number, event in enumerate(expected) if event.startswith("+"))
    assert events[: last + 1] == expected[: last + 1]
    assert sorted(events) == sorted(expected)  # what is freed first after the last request decides nothing


def test_command_says_what_is_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--real", str(tmp_path / "python")]) == 0
    assert capsys.readouterr().out.startswith(f"skipped: {tmp_path / 'python'} does not run")


@needs_compiler
def test_a_build_for_the_cpu_is_no_oracle(tmp_path: Path) -> None:
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    with pytest.raises(NoOracle, match="is no build for CUDA"):
        build_runtime(tmp_path, tmp_path)


def test_without_a_compiler_there_is_no_oracle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoOracle, match="there is no gcc"):
        build_runtime(tmp_path, tmp_path)


@needs_compiler
def test_what_torch_refers_to_is_found_and_answers_zero(tmp_path: Path) -> None:
    def compile_library(name: str, code: str, *options: str) -> Path:
        (tmp_path / "code.c").write_text(code)
        command = ["gcc", "-w", "-shared", "-fPIC", "code.c", f"-Wl,-soname,{name}", "-o", name, *options]
        subprocess.run(command, cwd=tmp_path, check=True)
        return tmp_path / name

    compile_library("libcudart.so.13", write_rest(["cudaEventQuery"]))
    code = "long cudaEventQuery(); long ncclSend(); long puts(); long f() { return cudaEventQuery() + ncclSend() + puts(0); }"
    library = compile_library("libtorch_cuda.so", code, "-L.", "-l:libcudart.so.13")
    assert needed_libraries([library]) == {"libcudart.so.13", "libcuda.so.1", "libnvidia-ml.so.1"}
    assert undefined_symbols([library]) == {"cudaEventQuery", "ncclSend"}
    by_name = compile_library("libc10_cuda.so", 'const char *name = "nvmlInit_v2";')
    assert symbols_by_name([library, by_name]) == {"nvmlInit_v2"}
    rest = compile_library("librest.so", write_rest(undefined_symbols([library])))
    assert ctypes.CDLL(str(rest)).ncclSend() == 0


def test_a_python_without_torch_is_no_oracle(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    assert main(["--real", str(bare)]) == 0
    assert "has no torch" in capsys.readouterr().out
