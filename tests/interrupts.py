"""Real signals at random moments of every entry point: what is left behind afterwards.

    python -m tests.interrupts                    2,000 signals
    python -m tests.interrupts 300 make_fx        300 signals, while make_fx runs

Each program runs in a process of its own, again and again, with a timer of the operating system set to a random moment
of it. Afterwards everything that could be left behind is compared with what was there before. The programs called
"torch: …" do the same without this library: what they lose, torch's own context managers and Python's lose.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import json
import math
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._python_dispatch as python_dispatch
from torch import nn

COUNT = 2_000
Program = Callable[[], Any]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.counted = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.counted(self.last(self.norm(self.first(x)).relu()))


@functools.cache
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer() for _ in range(3)])


@functools.cache
def batch() -> torch.Tensor:
    return torch.randn(5, 4)


def train(device: str = "cpu") -> None:
    """A step with most of the switches that torch has."""
    trained = nn.Sequential(Layer(), Layer())
    if device != "cpu":  # torch's own mode moves no module
        trained = trained.to(device)
    optimizer = torch.optim.AdamW(trained.parameters())
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = trained(torch.empty(5, 4, device=device)).sum()
    loss.backward()
    optimizer.step()
    with torch.no_grad(), torch.device(device):
        trained(torch.ones(5, 4))


def gradients(x: torch.Tensor) -> Any:
    return torch.func.grad(lambda x: model().eval()(x).sum())(x)  # training changes statistics, which transforms refuse


def library_programs() -> dict[str, Program]:
    import understudy
    from understudy import FakeTensorMode, ShapeEnv, make_fx

    def in_mode(device: str, **options: Any) -> None:
        with FakeTensorMode(**options):
            train(device)

    def symbols() -> None:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        x = mode.from_tensor(batch())
        with mode:
            y = mode.from_module(model())(x)
            torch.cat([y, y]).sum().backward()

    def cold() -> None:
        FakeTensorMode.cache_clear()
        with FakeTensorMode(), torch.no_grad():
            nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()(torch.empty(2, 3, 8))

    def copies() -> None:
        mode = FakeTensorMode()
        for _ in range(10):
            mode.from_module(model())
        with understudy.FakeCopyMode(mode):
            copy.deepcopy(model())

    def enter() -> None:
        for _ in range(50):
            with FakeTensorMode():
                pass

    def propagate() -> None:
        understudy.FakeTensorProp(traced()).propagate(batch())

    @functools.cache
    def traced() -> Any:
        return make_fx(model(), tracing_mode="fake")(batch())

    def step() -> None:
        trained = nn.Sequential(Layer(), Layer())
        optimizer = torch.optim.AdamW(trained.parameters())
        understudy.capture_step(trained, lambda y: y.sum(), optimizer, batch())

    def simulate() -> None:
        with understudy.simulate("2xh100"):
            model().to("cuda")
            torch.cuda.set_device(1)
            model()(torch.ones(5, 4, device="cuda:0")).sum().backward()

    return {
        "enter": enter,
        "mode": lambda: in_mode("cpu"),
        "mode cuda": lambda: in_mode("cuda"),
        "symbols": symbols,
        "cold cache": cold,
        "from_module": copies,
        "make_fx fake": lambda: make_fx(model(), tracing_mode="fake")(batch()),
        "make_fx symbolic": lambda: make_fx(model(), tracing_mode="symbolic")(batch()),
        "make_fx real": lambda: make_fx(model().eval())(batch()),
        "make_fx gradients": lambda: make_fx(gradients, tracing_mode="fake", allow_non_fake_inputs=True)(batch()),
        "make_fx pre_dispatch": lambda: make_fx(model(), tracing_mode="fake", pre_dispatch=True)(batch()),
        "symbolic_trace": lambda: understudy.symbolic_trace(model(), meta_args={"input": batch()}),
        "FakeTensorProp": propagate,
        "capture_step": step,
        "simulate": simulate,
        "export": lambda: understudy.export(model().eval(), (batch(),)),
        "rehearse": lambda: understudy.rehearse(train, "cuda", device="h100"),
    }


def torch_programs() -> dict[str, Program]:
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def in_mode() -> None:
        with FakeTensorMode():
            train()

    return {
        "torch: eager": train,
        "torch: mode": in_mode,
        "torch: make_fx": lambda: make_fx(model(), tracing_mode="fake", _allow_non_fake_inputs=True)(batch()),
        "torch: make_fx pre_dispatch": lambda: make_fx(model().eval(), pre_dispatch=True)(batch()),
        "torch: symbolic_trace": lambda: torch.fx.symbolic_trace(model()),
    }


# --- what could be left behind ------------------------------------------------------------------------------


def names_of(modes: list[Any]) -> list[str]:
    return [f"{type(mode).__module__}.{type(mode).__name__}" for mode in modes]


def function_modes() -> list[Any]:
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


def settings() -> dict[str, Any]:
    """The state of a thread, and of torch, as values that can be compared."""
    devices = ("cpu", "cuda")
    return {
        "dispatch modes": names_of(python_dispatch._get_current_dispatch_mode_stack()),
        "function modes": names_of(function_modes()),
        "dispatch keys included": str(torch._C._dispatch_tls_local_include_set()),
        "dispatch keys excluded": str(torch._C._dispatch_tls_local_exclude_set()),
        "grad enabled": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled(device) for device in devices],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "autocast depth": _autocast_depth(),
        "transforms": torch._C._functorch.peek_interpreter_stack() is None,
        "default dtype": str(torch.get_default_dtype()),
        "only lift cpu": torch._C._only_lift_cpu_tensors(),
        "compiler flags": [
            python_dispatch._is_in_torch_dispatch_mode, python_dispatch._is_in_any_mode_without_ignore_compile_internals,
        ],
        "garbage collector": gc.isenabled(),
        "handlers of signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM, signal.SIGTERM)],
        "python dispatcher": torch._C._get_dispatch_mode is not None and _python_dispatcher(),
        "gradients": _gradient_of_square(),
        "module call": id(nn.Module.__call__), "module getattr": id(nn.Module.__getattr__),
        "math": [id(value) for value in vars(math).values()],
    }  # fmt: skip


def _autocast_depth() -> int:
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return int(depth)


def _python_dispatcher() -> bool:
    return bool(torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PythonDispatcher))


def _gradient_of_square() -> list[float] | str:
    try:
        x = torch.full((2,), 3.0, requires_grad=True)
        (x * x).sum().backward()
        return "none" if x.grad is None else list(x.grad.tolist())
    except Exception as error:
        return type(error).__name__


def modules_state() -> dict[str, Any]:
    part = {name: (id(tensor), type(tensor).__name__) for name, tensor in model().state_dict(keep_vars=True).items()}
    return {"tensors of the module": part, "attributes": {n: sorted(vars(m)) for n, m in model().named_modules()}}


def patched_places() -> dict[str, Any]:
    if "understudy.patching" not in sys.modules:
        return {}
    from understudy.patching import ENGINE, find_place

    places = {patch.place: found for patch in ENGINE.registered if (found := find_place(patch)) is not None}
    contents = {place: id(vars(owner).get(name)) for place, (owner, name) in places.items()}
    return {
        "patches": contents, "holds": len(ENGINE.holds), "scopes": ENGINE.active, "settled": ENGINE.is_settled,
        "simulated cards": torch.cuda.device_count(),
    }  # fmt: skip


def everything() -> dict[str, Any]:
    return {**settings(), **modules_state(), **patched_places()}


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name, value in before.items() if after[name] != value]


# --- signals ------------------------------------------------------------------------------------------------


class Interrupt(KeyboardInterrupt):
    """What the handler of the signal raises."""


def interrupt(number: int, frame: Any) -> None:
    raise Interrupt


@contextlib.contextmanager
def handled() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_interrupted(program: Program, after: float) -> bool:
    """Whether the signal came while the program ran."""
    import traceback

    try:
        signal.setitimer(signal.ITIMER_REAL, after)
        program()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Interrupt as error:
        WHERE[:] = traceback.format_tb(error.__traceback__)[-6:]
        return True
    return False


WHERE: list[str] = []
"""Where the last signal came."""
OF_TORCH = (
    "torch/amp/autocast_mode.py", "torch/autograd/grad_mode.py", "in _use_grad", "in _pop_mode_temporarily",
    "with _pop_mode_temporarily",
)  # fmt: skip
"""Functions of torch that lose what they changed if a signal comes while they are entered or left."""


def shoot(name: str, count: int, seed: int) -> None:
    """Signals at random moments, until something is left behind: one line of JSON about each, on the standard output."""
    programs = torch_programs() if name.startswith("torch:") else library_programs()
    program = programs[name]
    model()
    batch()
    for _ in range(2):
        program()  # one that fails by itself ends the process with its error, before any signal
    print(json.dumps({"ready": True}), flush=True)
    begin = time.perf_counter()
    program()
    lasts = time.perf_counter() - begin
    chance = random.Random(seed)
    shots = 0
    with handled():
        before = everything()
        while shots < count:
            try:
                came = run_interrupted(program, chance.uniform(1e-5, lasts))
            except Interrupt:
                came = True
            shots += came
            if came and (left := differences(before, everything())):
                print(json.dumps({"shots": shots, "left": left, "where": WHERE}), flush=True)
                return
    print(json.dumps({"shots": shots, "left": [], "where": []}), flush=True)


def measure(name: str, count: int) -> tuple[Counter[str], list[str]]:
    """How often which things were left behind, of so many signals; and where these came."""
    found: Counter[str] = Counter()
    places: list[str] = []
    seed = 0
    while count > 0:
        code = f"from tests.interrupts import shoot; shoot({name!r}, {count}, {seed})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        if not done.stdout:
            raise RuntimeError(f"the program {name!r} fails without any signal:\n{done.stderr[-2000:]}")
        last = json.loads(done.stdout.splitlines()[-1])
        if "shots" not in last:
            last = {"shots": 1, "left": [f"the process ended with {done.returncode}"], "where": [done.stderr[-800:]]}
        found["signals"] += last["shots"]
        if last["left"] and any(name in place for name in OF_TORCH for place in last["where"]):
            found["left by torch's own context managers"] += 1
        elif last["left"]:
            found["left something"] += 1
            found.update(last["left"])
            places.append(f"{name}: {', '.join(last['left'])}\n" + "".join(last["where"]))
        count -= last["shots"]
        seed += 1
    return found, places


def main(count: int = COUNT, only: str = "") -> None:
    names = [name for name in (*library_programs(), *torch_programs()) if only in name]
    for name in names:
        found, places = measure(name, count // len(names))
        signals, left = found.pop("signals"), found.pop("left something", 0)
        print(f"{name:28} {signals:5} signals   left something behind: {left}   {dict(found) or ''}", flush=True)
        for place in places:
            print("    " + place.replace("\n", "\n    "))


if __name__ == "__main__":
    main(*([int(sys.argv[1])] if len(sys.argv) > 1 else []), *sys.argv[2:3])
