"""The patch engine: scopes, composition, what the user changes meanwhile, interrupts, and the list of all patches."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._dynamo

from tests.registered_patches import forget_new_patches
from understudy import FakeTensorMode, ShapeEnv, make_fx, patching, symbolic_trace
from understudy.cli.patches import load_all_patches
from understudy.patching import (
    ANY_MODE,
    ENGINE,
    RECORDING,
    SYMBOLS,
    TRACING,
    Hold,
    Patch,
    combine,
    find_place,
    patch,
    patch_found,
)

load_all_patches()
torch.compile(
    len, backend="eager"
)  # torch exchanges functions of its own when it first compiles, `torch.jit.trace` among them
SPACE = ModuleType("understudy_test_space")
"""A module to patch."""
sys.modules[SPACE.__name__] = SPACE
Function = Callable[..., Any]


def state_of_torch() -> dict[str, Any]:
    """What is in every place. The rooms that other tests have loaded register more while the tests run."""
    places = {patch.place: found for patch in ENGINE.registered if (found := find_place(patch)) is not None}
    return {place: vars(owner).get(name) for place, (owner, name) in places.items()}


@pytest.fixture(autouse=True)
def only_what_every_mode_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests may have used a simulated card, or scripted a function."""
    monkeypatch.setattr(ENGINE, "_with_any_mode", 0)


@pytest.fixture(autouse=True)
def torch_is_as_before() -> Iterator[None]:
    before = state_of_torch()
    state_of_torch.before = before  # type: ignore[attr-defined]
    yield
    after = state_of_torch()  # with the places of modules of torch that were loaded meanwhile
    assert {place: after[place] for place in before} == before
    assert not ENGINE.holds and ENGINE.active == 0 and ENGINE.is_settled


@pytest.fixture
def patches() -> Iterator[None]:
    """What a test registers is forgotten."""
    with forget_new_patches():
        yield
    vars(SPACE).pop("f", None)


def adding(letter: str) -> Function:
    def patched(original: Function) -> Function:
        """A reason."""
        return lambda: original() + letter

    return patched


# --- composition ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("patches")
def test_patches_of_one_place_compose_in_the_order_of_the_scopes() -> None:
    SPACE.f = lambda: "torch"  # type: ignore[attr-defined]
    original = SPACE.f
    patch(f"{SPACE.__name__}.f", during=RECORDING)(adding("R"))
    patch(f"{SPACE.__name__}.f", during=ANY_MODE)(adding("A"))
    patch(f"{SPACE.__name__}.f", during=(SYMBOLS, TRACING))(adding("S"))
    for scopes, expected in [
        ((ANY_MODE,), "torchA"),
        ((RECORDING,), "torchR"),
        ((RECORDING, ANY_MODE), "torchAR"),
        ((TRACING, RECORDING, ANY_MODE), "torchASR"),
        ((TRACING, SYMBOLS), "torchS"),
    ]:
        with patching.active(*scopes):
            assert SPACE.f() == expected
        assert SPACE.f is original
    with patching.active(RECORDING):
        with patching.active(ANY_MODE):
            assert SPACE.f() == "torchAR"
        assert SPACE.f() == "torchR"


def test_bits_of_scopes_are_in_the_order_of_the_scopes() -> None:
    """The rank of a patch is its lowest bit."""
    assert [scope.bit for scope in patching.SCOPES] == [
        1 << position for position in range(len(patching.SCOPES))
    ]


@pytest.mark.usefixtures("patches")
def test_scopes_can_be_left_in_any_order() -> None:
    SPACE.f = lambda: "torch"  # type: ignore[attr-defined]
    patch(f"{SPACE.__name__}.f", during=ANY_MODE)(adding("A"))
    patch(f"{SPACE.__name__}.f", during=RECORDING)(adding("R"))
    first, second, third = Hold(), Hold(), Hold()
    first.enter(combine(ANY_MODE))
    second.enter(combine(RECORDING))
    third.enter(combine(ANY_MODE))
    first.leave()
    assert SPACE.f() == "torchAR"
    third.leave()
    assert SPACE.f() == "torchR"
    second.leave()
    assert SPACE.f() == "torch"


@pytest.mark.usefixtures("patches")
def test_two_patches_of_one_place_and_scope_are_an_error() -> None:
    SPACE.f = lambda: "torch"  # type: ignore[attr-defined]
    patch(f"{SPACE.__name__}.f", during=(ANY_MODE, RECORDING))(adding("A"))
    with pytest.raises(
        TypeError, match=r"understudy_test_space\.f is patched twice in the same scope: by .*adding"
    ):
        patch(f"{SPACE.__name__}.f", during=RECORDING)(adding("B"))


def test_a_patch_says_why() -> None:
    with pytest.raises(TypeError, match="patches torch without a reason: give it a docstring"):
        patch("torch.relu", during=ANY_MODE)(lambda original: original)


@pytest.mark.usefixtures("patches")
def test_a_patch_that_is_registered_late_is_applied_at_once() -> None:
    SPACE.f = lambda: "torch"  # type: ignore[attr-defined]
    with FakeTensorMode():
        patch(f"{SPACE.__name__}.f", during=ANY_MODE)(adding("A"))
        assert SPACE.f() == "torchA"
    assert SPACE.f() == "torch"


@pytest.mark.usefixtures("patches")
def test_static_class_and_inherited_members() -> None:
    class Base:
        @staticmethod
        def inherited() -> str:
            return "inherited"

    class Owner(Base):
        @staticmethod
        def static() -> str:
            return "static"

        @classmethod
        def of_class(cls) -> str:
            return cls.__name__

    SPACE.Owner = Owner  # type: ignore[attr-defined]
    before = dict(vars(Owner))
    for name in ("inherited", "static"):
        patch(f"{SPACE.__name__}.Owner.{name}", during=ANY_MODE, reason="…")(
            lambda original: staticmethod(lambda: original() + "!")
        )
    patch(f"{SPACE.__name__}.Owner.of_class", during=ANY_MODE, reason="…")(
        lambda original: classmethod(lambda cls: original.__func__(cls) + "!")
    )
    with FakeTensorMode():
        assert (Owner.static(), Owner().inherited(), Owner.of_class()) == ("static!", "inherited!", "Owner!")
    assert dict(vars(Owner)) == before and Base.inherited() == "inherited"


# --- what the user changes meanwhile ----------------------------------------------------------------------------------


def mine(*args: Any, **kwargs: Any) -> str:
    return "mine"


@pytest.fixture
def compile_of_torch() -> Iterator[Function]:
    original = torch.compile
    yield original
    torch.compile = original


def test_what_the_user_patches_inside_stays(compile_of_torch: Function) -> None:
    with FakeTensorMode():
        torch.compile = mine  # type: ignore[assignment]
    assert torch.compile is mine
    with FakeTensorMode():
        assert torch.compile is not mine and torch.compile(len) is len
    assert torch.compile is mine
    torch.compile = compile_of_torch
    with FakeTensorMode():
        assert torch.compile(len) is len
    assert torch.compile is compile_of_torch


def test_what_the_user_patches_inside_is_not_covered_by_inner_modes(compile_of_torch: Function) -> None:
    with FakeTensorMode():
        torch.compile = mine  # type: ignore[assignment]
        with FakeTensorMode(shape_env=ShapeEnv()):
            assert torch.compile is mine
        make_fx(lambda x: x + 1)(torch.ones(2))
        assert torch.compile is mine
    assert torch.compile is mine


def test_what_the_user_patches_and_restores_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        with monkeypatch.context() as changed:
            changed.setattr(torch, "compile", mine)
            assert torch.compile() == "mine"  # type: ignore[call-overload]
        assert torch.compile(len) is len


def test_what_the_user_restores_too_late_is_taken_back(compile_of_torch: Function) -> None:
    with FakeTensorMode():
        ours = torch.compile
        torch.compile = mine  # type: ignore[assignment]
    torch.compile = ours
    assert torch.compile(len, backend="eager") is not len, "without a mode, ours does what torch's does"
    with FakeTensorMode():
        assert torch.compile(len) is len
    assert torch.compile is compile_of_torch


def test_ours_inside_of_a_wrapper_of_the_user(compile_of_torch: Function) -> None:
    with FakeTensorMode():
        ours = torch.compile
        torch.compile = wrapper = lambda *args, **kwargs: ("wrapped", ours(*args, **kwargs))  # type: ignore[assignment]
        assert torch.compile(len) == ("wrapped", len)
    assert torch.compile is wrapper
    assert torch.compile(len, backend="eager")[1] is not len


def test_a_method_of_a_class_that_the_user_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.nn.Linear.reset_parameters
    with FakeTensorMode():
        torch.nn.Linear.reset_parameters = mine  # type: ignore[method-assign, assignment]
    assert torch.nn.Linear.reset_parameters is mine
    torch.nn.Linear.reset_parameters = original  # type: ignore[method-assign]


# --- only what is needed ---------------------------------------------------------------------------------------------


def changed() -> set[str]:
    before = state_of_torch.before  # type: ignore[attr-defined]
    return {
        place for place, value in state_of_torch().items() if place in before and value is not before[place]
    }


def places_of(*scopes: patching.Scope) -> set[str]:
    return {
        patch.place for patch in ENGINE.registered
        if patch.mask & combine(*scopes) and find_place(patch) is not None
    }  # fmt: skip


def test_a_mode_changes_what_it_needs() -> None:
    with FakeTensorMode():
        assert changed() == places_of(ANY_MODE)
    with FakeTensorMode(shape_env=ShapeEnv()):
        assert changed() == places_of(ANY_MODE, SYMBOLS)
    assert not changed()
    assert not places_of(ANY_MODE) & {
        "torch.linspace",
        "torch.manual_seed",
        "torch.nn.Module.__call__",
    }


def test_a_trace_changes_each_place_once(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[tuple[int, int]] = []
    change = ENGINE.change

    def count(before: int, after: int) -> None:
        moves.append((before, after))
        change(before, after)

    monkeypatch.setattr(ENGINE, "change", count)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    symbolic_trace(model, {"input": torch.ones(2, 4)})
    entered = [after & ~before for before, after in moves]
    assert moves[-1][1] == 0 and sum(entered) == functools.reduce(int.__or__, entered)
    first, moves[:] = list(moves), []
    symbolic_trace(model, {"input": torch.ones(2, 4)})
    assert moves == first, "functions of `math` are found once"


def test_the_lower_room_does_not_depend_on_the_higher() -> None:
    """Recurrent layers under a mode, in a process that has not loaded the capture."""
    code = """
import sys, torch
from torch.utils._python_dispatch import TorchDispatchMode
from understudy import FakeTensorMode, ShapeEnv
drops = []
class Log(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        drops.append("dropout" in str(func) or "bernoulli" in str(func))
        return func(*args, **(kwargs or {}))
mode = FakeTensorMode(shape_env=ShapeEnv())
x = mode.from_tensor(torch.ones(5, 2, 3), static_shapes=False)
with mode:
    gru = torch.nn.GRU(3, 4, num_layers=3, dropout=0.5)
    with Log():
        gru(x)
assert "understudy.capture" not in sys.modules
assert sum(drops) == 2, drops
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_replacements_ask_for_this_thread() -> None:
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        with FakeTensorMode(shape_env=ShapeEnv()):
            inside.set()
            assert done.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(60)
    try:
        assert changed() == places_of(ANY_MODE, SYMBOLS)
        x = torch.nn.init.uniform_(torch.empty(3))
        assert type(x) is torch.Tensor and torch.compile(len, backend="eager") is not len
        assert torch.linspace(0, 1, 3).tolist() == [0, 0.5, 1] and list(
            torch.utils.data.RandomSampler([1])
        ) == [0]
    finally:
        done.set()
        thread.join()


# --- places that only the program tells --------------------------------------------------------------------------------


@pytest.mark.usefixtures("patches")
def test_found_places_are_held_and_given_back() -> None:
    make = patch_found("a place of the test", during=TRACING)(adding("F"))
    names: dict[str, Any] = {"f": lambda: "own"}
    original = names["f"]
    first, second = Hold(), Hold()
    first.replace(names, "f", make)
    second.replace(names, "f", make)
    first.leave()
    assert names["f"]() == "ownF"
    second.leave()
    assert names["f"] is original
    second.replace(names, "len", lambda original: lambda value: original(value) + 1)
    assert names["len"]([]) == 1
    second.leave()
    assert "len" not in names


@pytest.mark.usefixtures("patches")
def test_found_places_in_a_dict_stay_while_modes_begin_and_end() -> None:
    names: dict[str, Any] = {"f": lambda: "own"}
    before = dict(names)
    ENGINE.register(
        Patch(f"{SPACE.__name__}.f", adding("A"), ANY_MODE.bit, "no transition is prepared any more", True)
    )
    hold = Hold()
    hold.replace(names, "f", adding("F"))
    hold.replace(names, "len", lambda original: lambda value: original(value) + 1)
    for _ in range(2):
        with FakeTensorMode(shape_env=ShapeEnv()):
            assert names["f"]() == "ownF" and names["len"]([]) == 1
        assert names["f"]() == "ownF" and names["len"]([]) == 1
    hold.leave()
    assert names == before


@pytest.mark.usefixtures("patches")
def test_a_replacement_is_ours_however_many_were_made_since() -> None:
    SPACE.f = lambda: "torch"  # type: ignore[attr-defined]
    original = SPACE.f
    patch(f"{SPACE.__name__}.f", during=ANY_MODE)(adding("A"))
    groups = [ENGINE.find_group([(SPACE, "f")], adding(str(number))) for number in range(40)]
    for group in [0, *groups]:  # each has a replacement of its own
        with patching.active(ANY_MODE) as hold:
            hold.enter(group)
    with patching.active(ANY_MODE):  # the first one again
        ENGINE.find_group([(SPACE, "f")], adding("another"))  # all are made anew
        assert SPACE.f() == "torchA"
    assert SPACE.f is original


@pytest.mark.usefixtures("patches")
def test_found_places_compose_with_the_others() -> None:
    """A namespace and its module are the same owner."""
    SPACE.f = lambda: "torch"  # type: ignore[attr-defined]
    original = SPACE.f
    patch(f"{SPACE.__name__}.f", during=ANY_MODE)(adding("A"))
    found = patch_found("a place of the test", during=TRACING)(adding("F"))
    hold = Hold()
    for order in (0, 1):
        mode = FakeTensorMode()
        hold.replace(vars(SPACE), "f", found)
        assert SPACE.f() == "torchF"
        mode.__enter__()
        assert SPACE.f() == "torchAF"
        (hold.leave if order else mode.__exit__)()
        assert SPACE.f() == ("torchA" if order else "torchF")
        (mode.__exit__ if order else hold.leave)()
        assert SPACE.f is original


# --- interrupts ----------------------------------------------------------------------------------------------------------


def enter_nested(*modes: FakeTensorMode) -> None:
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        raise KeyboardInterrupt


@pytest.mark.parametrize("symbolic", [False, True])
def test_an_interrupt_inside_of_a_block(symbolic: bool) -> None:
    modes = [FakeTensorMode(shape_env=ShapeEnv() if symbolic else None) for _ in range(2)]
    with modes[0]:
        pass  # every place is found
    before = state_of_torch()
    with pytest.raises(KeyboardInterrupt):
        enter_nested(*modes)
    assert state_of_torch() == before and not ENGINE.holds


def test_the_outermost_block_leaves_what_an_interrupted_exit_has_left() -> None:
    outer, inner = FakeTensorMode(), FakeTensorMode()
    with outer:
        pass
    before = state_of_torch()
    with pytest.raises(KeyboardInterrupt) as interrupt, outer:
        inner.__enter__()
        raise KeyboardInterrupt  # comes before the first line of `inner.__exit__`
    assert state_of_torch() == before and not ENGINE.holds
    assert not getattr(interrupt.value, "__notes__", [])


@pytest.mark.usefixtures("patches")
def test_the_next_entry_completes_an_interrupted_change() -> None:
    SPACE.f = SPACE.g = lambda: "torch"  # type: ignore[attr-defined]
    original = SPACE.f
    is_interrupted = False

    def interrupt(original: Any) -> Any:
        if is_interrupted:
            raise KeyboardInterrupt
        return lambda: f"{original()}A"

    patch(f"{SPACE.__name__}.f", during=ANY_MODE)(adding("A"))
    patch(f"{SPACE.__name__}.g", during=ANY_MODE, reason="interrupted")(interrupt)
    is_interrupted = True
    with pytest.raises(KeyboardInterrupt), FakeTensorMode():
        raise AssertionError("the mode was entered")
    is_interrupted = False
    with FakeTensorMode():
        assert (SPACE.f(), SPACE.g()) == ("torchA", "torchA")
    assert SPACE.f is SPACE.g is original and ENGINE.is_settled and not ENGINE.holds


def test_a_hold_that_is_freed_is_left() -> None:
    hold = Hold()
    hold.enter(combine(TRACING))
    assert ENGINE.holds
    del hold
    assert not ENGINE.holds and ENGINE.active == 0


# --- the list ------------------------------------------------------------------------------------------------------------


def test_this_torch_has_every_place() -> None:
    assert [patch.place for patch in ENGINE.registered if find_place(patch) is None] == []


def test_few_places_are_patched() -> None:
    """A direction: the number goes down. A patch of torch or of Python's library stays if a public script or a user would
    notice that it is gone. Libraries that a rehearsed script imports are adapted one by one, and not counted."""
    patches = (*ENGINE.registered, *ENGINE.switches)
    places = {patch.place for patch in patches if patch.make.__module__.startswith("understudy.")}
    assert len(places) < 300


def test_the_list_names_every_patch() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "understudy.patching"], capture_output=True, text=True, timeout=120, check=True
    )
    text = done.stdout
    for registered in (*ENGINE.registered, *ENGINE.found_places, *ENGINE.switches):
        if not registered.make.__module__.startswith("understudy."):  # of the documentation
            continue
        assert f"  {registered.place}" in text
        assert "".join(registered.reason.split()) in "".join(text.split())
    assert "(symbols):" in text and "(while symbols, recording)" in text and "not in this release" not in text
    assert len(set(re.findall(r"^  (?! )(.+)$", text, re.M))) == len(re.findall(r"^  (?! )(.+)$", text, re.M))


def test_the_list_ends_quietly_when_its_reader_has_gone() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "understudy.patching"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_is_changed_at_import() -> None:
    code = """
import torch, torch._dynamo, torch.fx.experimental.proxy_tensor
def everything():
    import sys
    owners = {n: m for n, m in list(sys.modules.items()) if n.startswith("torch") and m is not None}
    return {(n, k): v for n, m in owners.items() for k, v in list(vars(m).items()) if callable(v)}
before = everything()
members = {(c, k): v for c in (torch.Tensor, torch.nn.Module, torch.nn.Linear, torch.SymInt) for k, v in vars(c).items()}
from understudy.cli.patches import load_all_patches
load_all_patches()
after = everything()
assert all(after[key] is value for key, value in before.items()), [k for k, v in before.items() if after[k] is not v]
assert all(vars(owner)[name] is value for (owner, name), value in members.items())
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_the_compiler_of_torch_is_loaded_without_patches() -> None:
    """It keeps tables of torch's functions. An optimizer loads it when it is first used."""
    script = """
import os, sys, torch, understudy
from understudy import FakeTensorMode
with FakeTensorMode():
    parameter = torch.nn.Parameter(torch.ones(2))
    assert "torch._dynamo" not in sys.modules
    optimizer = torch.optim.SGD([parameter])
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert "torch._dynamo" in sys.modules and type(torch.tensor([1.0])).__name__ == "FakeTensor"
known = torch._dynamo.trace_rules.get_torch_obj_rule_map()
assert torch.tensor in known
files = [getattr(getattr(function, "__code__", None), "co_filename", "") for function in known]
package = os.path.join(os.path.dirname(understudy.__file__), "")  # torch may be installed in a folder of the same name
assert not [file for file in files if file.startswith(package)]
print(torch.compile(lambda x: x + torch.tensor([1.0, 2.0]), backend="eager", fullgraph=True)(torch.ones(2)).tolist())
"""
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        == "[2.0, 3.0]\n"
    )


def test_every_scope_is_in_the_docs() -> None:
    page = (Path(__file__).parent.parent / "docs" / "how-it-works.md").read_text()
    names = {name for name, value in vars(patching).items() if isinstance(value, patching.Scope)}
    assert len(names) == len(patching.SCOPES)
    assert [name for name in sorted(names) if f"| `{name}` |" not in page] == []


def test_what_few_programs_need_is_patched_when_they_come() -> None:
    with FakeTensorMode():
        x = torch.ones(3)
        assert "resize_" not in vars(torch.UntypedStorage) or ENGINE.active & patching.STORAGES.bit
        x.untyped_storage()
        assert ENGINE.active & patching.STORAGES.bit
        assert "resize_" in vars(torch.UntypedStorage)
    assert "resize_" not in vars(torch.UntypedStorage)
    with FakeTensorMode():  # from now on, with every mode
        assert "resize_" in vars(torch.UntypedStorage)
    assert not ENGINE.active
