"""Scripts as `python script.py` runs them: arguments, exits, errors, steps, threads."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

from understudy.fake.mode import FakeTensorMode
from understudy.simulation.interrupts import keep_interrupts
from understudy.simulation.sandbox import NO_SANDBOX, Sandbox
from understudy.simulation.scripts import Script, ScriptResult, run_script


def run(folder: Path, text: str, *arguments: str, steps: int | None = 2) -> ScriptResult:
    file = folder / "script.py"
    file.write_text(text)
    with FakeTensorMode(answers="plausible", allow_non_fake_inputs=True) as mode:
        return run_script(Script(str(file), arguments), mode=mode, steps=steps)


def test_an_interrupt_in_a_callback_is_not_lost() -> None:
    """Python ignores what is raised in the callback of a weak reference."""

    class Thing:
        pass

    done = []

    def callback(reference: object) -> None:
        signal.raise_signal(signal.SIGINT)
        done.append(reference)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), keep_interrupts(callback):
            thing = Thing()
            reference = weakref.ref(thing, callback)
            del thing
            assert done == [reference]
            time.sleep(10)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(KeyboardInterrupt), keep_interrupts(callback):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


ORDINARY = """
import os, sys
import helper
import __main__
value = 3
print(sys.argv[1:], os.path.basename(sys.argv[0]), os.path.basename(__file__), __name__, helper.VALUE, __main__.value)
print(sys.path[0] == os.path.dirname(os.path.realpath(__file__)))
"""


def test_as_python_runs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "helper.py").write_text("VALUE = 7\n")
    before = sys.argv, list(sys.path), sys.modules["__main__"]
    result = run(tmp_path, ORDINARY, "--a", "b")
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before
    assert result.exit_code == 0 and result.error == ""
    said = capsys.readouterr().out
    real = subprocess.run(
        [sys.executable, tmp_path / "script.py", "--a", "b"], capture_output=True, text=True, check=True
    )
    assert said == real.stdout
    sys.modules.pop("helper", None)


def test_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "train.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    monkeypatch.chdir(tmp_path)
    with FakeTensorMode() as mode:
        result = run_script(Script("package.train", ("-x",), is_module=True), mode=mode)
    assert result.exit_code == 0, result.error
    assert capsys.readouterr().out == "__main__ ['-x']\n"


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("sys.exit()", 0),
        ("sys.exit(0)", 0),
        ("sys.exit(5)", 5),
        ("sys.exit('no')", 1),
        ("raise KeyboardInterrupt", 130),
        ("import os; os._exit(3)", 3),
    ],
)
def test_exits(tmp_path: Path, statement: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, f"import sys\n{statement}").exit_code == code
    assert capsys.readouterr().err == ("no\n" if "no" in statement else "")


def test_a_forked_process_ends_at_once(tmp_path: Path) -> None:
    program = """
import os
child = os.fork()
if not child:
    try:
        os._exit(7)
    finally:
        os._exit(8)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
    assert run(tmp_path, program).error == ""


def test_an_error_has_the_traceback_of_the_script_alone(tmp_path: Path) -> None:
    result = run(
        tmp_path, "import torch\ndef f(x):\n    return x @ torch.randn(3, 5)\nf(torch.randn(2, 4))\n"
    )
    assert result.exit_code == 1
    lines = result.error.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].endswith('script.py", line 4, in <module>')
    assert any(
        line.endswith('script.py", line 3, in f') for line in lines[3:5]
    )  # Python 3.13 underlines the call
    assert "understudy/simulation" not in result.error and "fake/mode.py" not in result.error
    assert "f32[2, 4]" in result.error


def test_a_syntax_error_is_the_scripts(tmp_path: Path) -> None:
    result = run(tmp_path, "x = = 1\n")
    assert result.exit_code == 1
    assert "SyntaxError" in result.error and "understudy/simulation" not in result.error


TRAINING = """
import atexit, torch
atexit.register(print, "at exit")
def bye():
    print("bye")
atexit.register(bye)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    for step in range(100):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", step)
finally:
    print("finally")
print("evaluation")
"""


def test_it_ends_after_so_many_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(tmp_path, TRAINING, steps=3)
    assert (result.steps, result.was_ended, result.exit_code) == (3, True, 0)
    assert capsys.readouterr().out.splitlines() == ["step 0", "step 1", "finally", "bye", "at exit"]


def test_all_optimizers_count(tmp_path: Path) -> None:
    text = """
import torch
a, b = (torch.nn.Parameter(torch.randn(3)) for _ in range(2))
often, seldom = torch.optim.SGD([a], lr=1), torch.optim.SGD([b], lr=1)
count = 0
for step in range(100):
    (a.sum() + b.sum()).backward()
    often.step()
    if step % 5 == 4:
        seldom.step()
    count = step
    open("count", "w").write(str(count))
"""
    result = run(tmp_path, text, steps=2)
    assert result.steps == 2
    assert result.writes[0].count == 9  # the step of the second optimizer ends the tenth round


def test_an_optimizer_whose_parameters_another_one_updates_is_not_waited_for(tmp_path: Path) -> None:
    """As SAM: its own `step` is never called."""
    text = """
import torch
a = torch.nn.Parameter(torch.randn(3))
outer = torch.optim.Optimizer([a], {})
inner = torch.optim.SGD(outer.param_groups, lr=1)
while True:
    a.sum().backward()
    inner.step()
"""
    assert run(tmp_path, text, steps=2).steps == 9


def test_a_script_without_an_optimizer_runs_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(tmp_path, "import torch\nprint(torch.nn.Linear(3, 4)(torch.ones(2, 3)).shape)\n")
    assert (result.steps, result.was_ended) == (0, False)
    assert capsys.readouterr().out == "torch.Size([2, 4])\n"


def test_threads_are_in_the_mode(tmp_path: Path) -> None:
    text = """
import threading, torch
from concurrent.futures import ThreadPoolExecutor
from understudy import FakeTensor
found = []
thread = threading.Thread(target=lambda: found.append(type(torch.empty(2)) is FakeTensor))
thread.start(); thread.join()
with ThreadPoolExecutor(2) as pool:
    found += pool.map(lambda _: type(torch.empty(2)) is FakeTensor, range(4))
assert found == [True] * 5, found
"""
    assert run(tmp_path, text).error == ""


def test_torch_compile_is_labelled(tmp_path: Path) -> None:
    result = run(tmp_path, "import torch\ntorch.compile(torch.nn.Linear(2, 2))(torch.ones(1, 2))\n")
    ((reason, part),) = result.notes.margins.items()
    assert reason.startswith("torch.compile: rehearsed as eager") and part == 0.15


def test_functions_that_a_package_compiles_at_import_are_not_the_programs(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "quantising"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import torch\nhelper = torch.compile(lambda x: x)\ndef prepare(model): return torch.compile(model)\n"
    )
    text = f"import sys\nsys.path.insert(0, {str(package.parent)!r})\nimport torch, quantising\n"
    assert not run(tmp_path, text).notes.margins
    assert run(tmp_path, text + "quantising.prepare(torch.nn.Linear(2, 2))\n").notes.margins


def test_an_existing_checkpoint_is_byte_for_byte_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.chdir(tmp_path)
    torch.save({"weight": torch.randn(4, 4)}, "model.pt")
    before = (tmp_path / "model.pt").read_bytes()
    text = """
import os, torch
state = torch.load("model.pt")
state["weight"] += 1
torch.save(state, "model.pt")
torch.save(state, "other.pt")
os.replace("other.pt", "model.pt")
assert torch.load("model.pt")["weight"].shape == (4, 4)
os.remove("model.pt")
assert not os.path.exists("model.pt")
"""
    result = run(tmp_path, text)
    assert result.error == ""
    assert (tmp_path / "model.pt").read_bytes() == before
    assert {write.what for write in result.writes} == {"torch.save", "rename", "remove"}


def test_the_network_is_off(tmp_path: Path) -> None:
    text = """
import urllib.request
try:
    urllib.request.urlopen("http://192.0.2.1/", timeout=5)
except OSError as error:
    assert "offline" in str(error), error
else:
    raise AssertionError
"""
    result = run(tmp_path, text)
    assert result.error == ""
    assert [(write.what, write.target) for write in result.writes] == [("connect", "192.0.2.1:80")]


def test_no_name_server_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is the same on machines with and without one, and the connection is listed on both."""

    def ask(*args: object) -> object:
        raise AssertionError(args)

    monkeypatch.setattr(socket, "gethostbyname", ask)
    text = """
import socket, urllib.request
for ask in (lambda: urllib.request.urlopen("https://api.tracker.example/log", data=b"1"), lambda: socket.gethostbyname("a.example")):
    try:
        ask()
    except OSError as error:
        assert "offline" in str(error), error
    else:
        raise AssertionError
assert socket.getaddrinfo("localhost", 80) and socket.getaddrinfo("127.0.0.1", 80) and socket.getaddrinfo(None, 80)
"""
    result = run(tmp_path, text)
    assert result.error == ""
    assert [write.target for write in result.writes] == ["api.tracker.example:443", "a.example"]


def test_the_current_folder_is_that_of_the_user_again(tmp_path: Path) -> None:
    before = os.getcwd()
    result = run(
        tmp_path,
        "import os\nos.makedirs('runs')\nos.chdir('runs')\nopen('x', 'w').close()\nos.chdir('/')\nos.chdir('/tmp')",
    )
    assert result.error == ""
    assert os.getcwd() == before


def test_writing_can_be_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("open('x', 'w').write('y')")
    with FakeTensorMode() as mode:
        assert run_script(Script("script.py"), mode=mode, sandbox=Sandbox(NO_SANDBOX)).writes == []
    assert (tmp_path / "x").read_text() == "y"


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    import builtins
    import os
    import threading

    import torch

    before = builtins.open, os.stat, threading.Thread.start, torch.save, dict(os.environ), list(sys.meta_path)
    for text in (TRAINING, "1 / 0", "raise KeyboardInterrupt"):
        run(tmp_path, text)
        after = (
            builtins.open,
            os.stat,
            threading.Thread.start,
            torch.save,
            dict(os.environ),
            list(sys.meta_path),
        )
        assert after == before


WRITERS = {
    "text of NumPy": "import numpy as np\nnp.savetxt('out', np.zeros(3))\nassert np.loadtxt('out').shape == (3,)",
    "a scripted module": "import torch\ntorch.jit.script(torch.nn.Linear(2, 2)).save('out')\ntorch.jit.load('out')",
    "a scripted function": "import torch\ntorch.jit.save(torch.jit.script(torch.nn.ReLU()), 'out')\ntorch.jit.load('out')",
    "a trace": "import torch\nwith torch.profiler.profile() as p:\n    torch.ones(2) + 1\np.export_chrome_trace('out')",
    "stacks": (
        "import torch\nwith torch.profiler.profile(with_stack=True) as p:\n    torch.ones(2) + 1\n"
        "p.export_stacks('out', 'self_cpu_time_total')"
    ),
    "a compressed file": "import bz2\nbz2.open('out', 'wb').close()",
    "an archive": "import tarfile\ntarfile.open('out', 'w').close()\nassert tarfile.is_tarfile('out')",
}


@pytest.mark.parametrize("name", WRITERS)
def test_files_of_libraries_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(tmp_path, f"{WRITERS[name]}\n")
    assert result.exit_code == 0, result.error
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]
    assert any(write.to_record()["target"].endswith("out") for write in result.writes)


SPAWNED = """
import torch
import torch.multiprocessing as mp

def train(rank, world):
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()

if __name__ == "__main__":
    mp.spawn(train, args=({count},), nprocs={count})
"""


def test_spawned_processes_are_rehearsed_in_this_one(tmp_path: Path) -> None:
    result = run(tmp_path, SPAWNED.format(count=1))
    assert (result.exit_code, result.steps, result.was_ended) == (0, 2, True)


def test_several_processes_need_cards(tmp_path: Path) -> None:
    result = run(tmp_path, SPAWNED.format(count=4))
    assert result.exit_code == 1 and "name them, as in --device 4xh100" in result.error
