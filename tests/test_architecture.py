"""The shape of the source: directions of imports, private API in one package, maps that name every module.

Read with `ast`, nothing is imported: a file that breaks a promise is named with its line.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

import understudy

SOURCE = Path(__file__).parent.parent / "src" / "understudy"
FILES = sorted(SOURCE.rglob("*.py"))

# Each room may import itself and those before it: the drawing in docs/how-it-works.md.
ROOMS = (
    "errors",
    "lines",
    "patching",
    "_torch",
    "shapes",
    "spec",
    "ops",
    "infer",
    "fake",
    "graph",
)
BELOW_GRAPH = ROOMS[: ROOMS.index("graph")]
# Rooms beside each other: what each may import besides itself.
SIDE_ROOMS: dict[str, tuple[str, ...]] = {
    "capture": ROOMS,
    "prop": ROOMS,
    "meta": ROOMS,
    "exporting": (*ROOMS, "capture", "prop", "meta"),
    "simulation": BELOW_GRAPH,
    "timing": (*BELOW_GRAPH, "simulation"),
    "cluster": (*BELOW_GRAPH, "simulation", "timing"),
    "report": (*BELOW_GRAPH, "simulation", "timing", "cluster"),
    "plans": (*BELOW_GRAPH, "simulation", "timing", "cluster", "report"),
}
ALONE = {
    "errors": (),
    "lines": (),
    "patching": (),
    "_torch": ("patching",),
}
"""These know nothing of the others, nor of each other, but for what is named here."""

# What this library replaces: it must stand without them.
REPLACED = (
    "torch._subclasses",
    "torch.fx.experimental.proxy_tensor",
    "torch.fx.experimental.symbolic_shapes",
    "torch.fx.experimental.meta_tracer",
    "torch.fx.passes.fake_tensor_prop",
)
# Torch and its ecosystem ask for identity; there, a class of theirs may be named (never called).
MAY_NAME_REPLACED = {
    "_torch/": "isinstance(x, FakeTensor) is asked by torch and by transformers",
    "exporting/interop.py": "hands graphs over to torch's own tools, with torch's own fake values",
}

# Torch is changed by the patch engine, which gives everything back; `python -m understudy.patching` lists it.
MAY_CHANGE_TORCH = {
    "_torch/dispatch.py: _set_flags": "the switch of the engine that sets two flags of torch, and restores them",
}

REASON = "# why:"

# The public doors import from every room, and nothing imports them: the package itself, the names of torch's modules, the
# command line.
DOORS = (
    "__init__", "__main__", "cli", "fake_tensor", "proxy_tensor", "symbolic_shapes", "fake_tensor_prop", "meta_tracer",
    "pytest_plugin", "torch_names",
)  # fmt: skip


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def room_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The file's tree, with relative imports made absolute."""
    tree = ast.parse(path.read_text(), filename=str(path))
    package = ("understudy", *path.relative_to(SOURCE).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            node.module = ".".join((*base, *([node.module] if node.module else [])))
            node.level = 0
    return tree


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every imported name with its module in front: `from a.b import c` is `a.b.c`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def dotted(node: ast.expr) -> str | None:
    """`torch.a.b` as text, if the expression is nothing but names and dots."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


def aliases(tree: ast.Module) -> dict[str, str]:
    """What each imported name stands for."""
    known_as: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                target = alias.name if alias.asname else alias.name.partition(".")[0]
                known_as[alias.asname or target] = target
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                known_as[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return known_as


def torch_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every name under torch that the file imports or reaches through attributes, aliases resolved."""
    known_as = aliases(tree)
    for line, name in imported_names(tree):
        if is_under(name, "torch"):
            yield line, name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node)):
            first, _, rest = name.partition(".")
            full = f"{known_as.get(first, first)}.{rest}"
            if is_under(full, "torch"):
                yield node.lineno, full


def is_under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def is_private(name: str) -> bool:
    """A part that begins with an underscore. `__version__` and its like are public, and so are operators,
    which models reach whatever their names (`torch.ops.aten._softmax`)."""
    return not is_under(name, "torch.ops") and any(
        part.startswith("_") and not part.startswith("__") for part in name.split(".")
    )


def unique(found: Iterable[tuple[Path, int, str]]) -> list[str]:
    return [f"{relative(path)}:{line}: {name}" for path, line, name in sorted(set(found))]


def is_listed(path: Path, table: dict[str, str]) -> bool:
    """Whether a table of exceptions names this file, or its folder."""
    return any(
        relative(path) == entry or (entry[-1] == "/" and relative(path).startswith(entry)) for entry in table
    )


def test_there_is_something_to_check() -> None:
    assert {"errors", "spec", "ops", "capture"} <= {room_of(path) for path in FILES}


def allowed_rooms(room: str) -> tuple[str, ...]:
    if room in SIDE_ROOMS:
        return (room, *SIDE_ROOMS[room])
    assert room in ROOMS, f"{room} is no room: name it in ROOMS, in its place"
    return (room, *ALONE[room]) if room in ALONE else ROOMS[: ROOMS.index(room) + 1]


def test_imports_go_one_way() -> None:
    wrong = [
        f"{relative(path)}:{line}: {name}"
        for path in FILES
        if room_of(path) not in DOORS
        for line, name in imported_names(parsed(path))
        if is_under(name, "understudy") and (name.split(".") + [""])[1] not in allowed_rooms(room_of(path))
    ]
    assert not wrong, f"imports from a later room: {wrong}"


PACKAGES = sorted(path.parent for path in FILES if path.name == "__init__.py")


def test_each_package_has_a_map() -> None:
    """Its docstring names each of its modules and packages."""
    missing = []
    for package in PACKAGES:
        docstring = ast.get_docstring(parsed(package / "__init__.py")) or ""
        modules = [path.stem for path in package.glob("*.py") if not path.stem.startswith("__")]
        modules += [path.name for path in package.iterdir() if (path / "__init__.py").exists()]
        missing += [
            f"{relative(package)}/__init__.py: {name}"
            for name in sorted(modules)
            if not re.search(rf"\b{name}\b", docstring)
        ]
    assert not missing, f"the docstring of a package names all of its modules; missing: {missing}"


def test_no_module_and_no_public_function_share_a_name() -> None:
    """`understudy.x` is either a function or a module, never one that the import of the other replaces."""
    here = {path.stem for path in SOURCE.glob("*.py")} | {
        package.name for package in PACKAGES if package.parent == SOURCE
    }
    assert not here & set(understudy.__all__)


def test_private_torch_api_is_in_one_package() -> None:
    wrong = unique(
        (path, line, name)
        for path in FILES
        if not is_listed(path, MAY_NAME_REPLACED)
        for line, name in torch_names(parsed(path))
        if is_private(name)
    )
    assert not wrong, f"private torch API belongs into _torch/: {wrong}"


def test_what_we_replace_is_not_used() -> None:
    wrong = unique(
        (path, line, name)
        for path in FILES
        if not is_listed(path, MAY_NAME_REPLACED)
        for line, name in torch_names(parsed(path))
        if any(is_under(name, replaced) for replaced in REPLACED)
    )
    assert not wrong, f"uses what this library replaces: {wrong}"


def imports_without_reason(path: Path) -> Iterator[tuple[Path, int, str]]:
    lines = path.read_text().splitlines()
    for function in ast.walk(parsed(path)):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        for node in ast.walk(function):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                around = lines[max(0, node.lineno - 2) : node.end_lineno]
                if not any(REASON in line for line in around):
                    yield path, node.lineno, lines[node.lineno - 1].strip()


def test_imports_inside_functions_have_a_reason() -> None:
    """Such an import carries `# why: …` on its line or on the line above."""
    wrong = unique(found for path in FILES for found in imports_without_reason(path))
    assert not wrong, f"an import inside a function needs `{REASON} …`: {wrong}"


def test_no_global_statement() -> None:
    wrong = unique(
        (path, node.lineno, "global")
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Global)
    )
    assert not wrong, f"state needs an owner: {wrong}"


def changes_of_torch(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """(line, function around it, place) of each assignment to a name of torch, whatever the means."""
    known_as = aliases(tree)
    around = {
        id(inner): function.name
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for inner in ast.walk(function)
    }
    for node in ast.walk(tree):
        for changed in changed_by(node):
            name = dotted(changed)
            first, _, rest = (name or "").partition(".")
            full = ".".join(filter(None, (known_as.get(first, first), rest)))
            if first in known_as and is_under(full, "torch"):
                yield node.lineno, around.get(id(node), ""), full


def changed_by(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement or a call writes to: `x` in `x.name = …`, `setattr(x, …)`, `vars(x)[…] = …`, `vars(x).update(…)`."""
    targets: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        targets = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        targets = [node.target]
    elif isinstance(node, ast.Call) and dotted(node.func) in ("setattr", "delattr"):
        yield node.args[0]
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in WRITES_TO_A_DICT
    ):
        yield from namespace_of(node.func.value)
    for target in targets:
        for part in ast.walk(target):
            if isinstance(part, ast.Attribute) and not isinstance(part.ctx, ast.Load):
                yield part.value
            elif isinstance(part, ast.Subscript) and not isinstance(part.ctx, ast.Load):
                yield from namespace_of(part.value)


WRITES_TO_A_DICT = ("update", "setdefault", "pop", "clear")


def namespace_of(node: ast.expr) -> Iterator[ast.expr]:
    """x of `vars(x)` and `x.__dict__`."""
    if isinstance(node, ast.Call) and dotted(node.func) == "vars" and node.args:
        yield node.args[0]
    elif isinstance(node, ast.Attribute) and node.attr == "__dict__":
        yield node.value


def test_torch_is_changed_by_the_engine_only() -> None:
    wrong = unique(
        (path, line, place)
        for path in FILES
        for line, function, place in changes_of_torch(parsed(path))
        if f"{relative(path)}: {function}" not in MAY_CHANGE_TORCH
    )
    assert not wrong, f"torch is changed by patches only (understudy.patching): {wrong}"


# The checks are themselves checked on text that breaks them.


def private_in(text: str) -> list[str]:
    tree = ast.parse(inspect.cleandoc(text))
    return [name for _, name in sorted(set(torch_names(tree))) if is_private(name)]


@pytest.mark.parametrize(
    "text",
    [
        "import torch._C",
        "from torch import _ops",
        "from torch.utils import _pytree as pytree",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "import torch\nx = torch._C._dispatch_keys",
        "import torch as t\nx = t.utils._pytree",
        "from torch import utils\nx: utils._pytree.PyTree",
    ],
)
def test_private_api_is_found(text: str) -> None:
    assert private_in(text)


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nx = torch.empty(2)\nx._version",
        "import torch\ntorch.__version__",
        "import torch\ntorch.ops.aten._softmax",
    ],
)
def test_public_api_is_not_reported(text: str) -> None:
    assert not private_in(text)


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.compile = None",
        "import torch\ntorch.nn.Linear.forward = None",
        "from torch.nn import Module\nModule.__call__ = None",
        "import torch.utils._python_dispatch as modes\nmodes.flag = True",
        "import torch\nsetattr(torch.Tensor, name, value)",
        "import torch\ndel torch.compile",
        "import torch\nx, torch.compile = 1, 2",
        "import torch\nvars(torch)['compile'] = 2",
        "import torch\nvars(torch).update(compile=2)",
        "import torch\ntorch.__dict__['compile'] = 2",
        "def f():\n    import torch.nn as nn\n    nn.x += 1",
    ],
)
def test_a_change_of_torch_is_found(text: str) -> None:
    assert list(changes_of_torch(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nx = torch.empty(2)\nx.data = torch.ones(2)",
        "import torch\ny[torch.tensor(1)] = 2",
        "import torch\nclass A(torch.nn.Module):\n    def f(self):\n        self.x = torch.ones(2)",
    ],
)
def test_other_assignments_are_not_reported(text: str) -> None:
    assert not list(changes_of_torch(ast.parse(text)))


# What is known of operators stands in ops/: a name of an operator elsewhere is used, not listed.

LISTED_NAMES = 4
MAY_LIST_OPERATORS = {
    "shapes/torch_api/names.py": "is_accessor_node has a list of torch's, and shapes/ knows nothing of ops/",
    "fake/values/sizes_in_tensors.py": "registers, for each operator, the function that evaluates it",
    "_torch/": "places of torch, by the names that torch gives them",
}


@functools.cache
def operator_names() -> frozenset[str]:
    names = torch._C._dispatch_get_all_op_names()
    return frozenset(name.partition("::")[2].partition(".")[0] for name in names)


def listed_operators(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lists, sets, tuples and dicts that name several operators of aten."""
    known = operator_names()
    for node in ast.walk(tree):
        parts = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", ())
        names = [
            part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)
        ]
        operators = [
            name for name in names if name.partition("::")[2].partition(".")[0] in known and "::" in name
        ]
        operators += [
            part for part in parts if (dotted(part) or "" if part is not None else "").startswith("aten.")
        ]
        if len(operators) >= LISTED_NAMES:
            yield node.lineno, str(names[:3] or "aten.…")


def test_operators_are_listed_in_ops() -> None:
    wrong = unique(
        (path, line, names)
        for path in FILES
        if room_of(path) != "ops" and not is_listed(path, MAY_LIST_OPERATORS)
        for line, names in listed_operators(parsed(path))
    )
    assert not wrong, f"a table of operators belongs into ops/: {wrong}"


def test_a_list_of_operators_is_found() -> None:
    assert list(
        listed_operators(
            ast.parse('X = {"aten::mm": 1, "aten::bmm": 2, "aten::add.Tensor": 3, "aten::t": 4}')
        )
    )
    assert list(
        listed_operators(
            ast.parse("X = {aten.mm.default, aten.bmm.default, aten.t.default, aten.add.Tensor}")
        )
    )
    assert not list(listed_operators(ast.parse('X = {"mean": 1, "sum": 2, "none": 3, "max": 4}')))
