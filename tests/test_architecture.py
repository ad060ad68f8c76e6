"""The shape of the source: layers, private API in one file, imports at the top, small files.

Read with `ast`, nothing is imported: a file that breaks a promise is named with its line.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "understudy"
FILES = sorted(SOURCE.rglob("*.py"))
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: relative(path))

# Each layer may import itself and those before it. `_torch` knows nothing of the others.
LAYERS = (
    "errors", "_torch", "lines", "shapes", "spec", "rules", "infer", "fake", "trace", "simulate", "report", "cli",
)  # fmt: skip

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
    "_torch.py": "isinstance(x, FakeTensor) is asked by torch and by transformers",
    "trace/interop.py": "hands graphs over to torch's own tools, with torch's own fake values",
}

# State has one owner; a `global` statement is state that has none.
MAY_SAY_GLOBAL = {"_torch.py": "counts entries into torch's own process-wide flags"}

LONGEST_FILE = 600
MAY_BE_LONGER = {"_torch.py": 1430}
"""All private torch API is in one file: that it is one matters more than its length."""
LONGEST_FUNCTION = 80
REASON = "# why:"

# The public door imports from every layer, and nothing imports it.
DOORS = ("__init__", "__main__")


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def layer_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


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


def torch_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every name under torch that the file imports or reaches through attributes, aliases resolved."""
    known_as: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                target = alias.name if alias.asname else alias.name.partition(".")[0]
                known_as[alias.asname or target] = target
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                known_as[alias.asname or alias.name] = f"{node.module}.{alias.name}"
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


def unique(found: Iterator[tuple[int, str]]) -> list[str]:
    return [f"line {line}: {name}" for line, name in sorted(set(found))]


def test_there_is_something_to_check() -> None:
    assert {"errors", "spec", "rules"} <= {layer_of(path) for path in FILES}


@each_file
def test_imports_go_one_way(path: Path) -> None:
    layer = layer_of(path)
    if layer in DOORS:
        return
    assert layer in LAYERS, f"{relative(path)} belongs to no layer: name it in LAYERS, in its place"
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    if layer == "_torch":
        allowed = ("_torch",)
    wrong = [
        f"line {line}: {name}"
        for line, name in imported_names(parsed(path))
        if is_under(name, "understudy") and (name.split(".") + [""])[1] not in allowed
    ]
    assert not wrong, f"{relative(path)} ({layer}) imports from a later layer: {wrong}"


@each_file
def test_private_torch_api_is_in_one_file(path: Path) -> None:
    if relative(path) in MAY_NAME_REPLACED:
        return
    wrong = unique((line, name) for line, name in torch_names(parsed(path)) if is_private(name))
    assert not wrong, f"{relative(path)} reaches private torch API, which belongs into _torch.py: {wrong}"


@each_file
def test_what_we_replace_is_not_used(path: Path) -> None:
    if relative(path) in MAY_NAME_REPLACED:
        return
    found = torch_names(parsed(path))
    wrong = unique(
        (line, name) for line, name in found if any(is_under(name, replaced) for replaced in REPLACED)
    )
    assert not wrong, f"{relative(path)} uses what this library replaces: {wrong}"


@each_file
def test_imports_inside_functions_have_a_reason(path: Path) -> None:
    """Such an import carries `# why: …` on its line or on the line above."""
    lines = path.read_text().splitlines()
    wrong = []
    for function in ast.walk(parsed(path)):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        for node in ast.walk(function):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                around = lines[max(0, node.lineno - 2) : node.end_lineno]
                if not any(REASON in line for line in around):
                    wrong.append(f"line {node.lineno}: {lines[node.lineno - 1].strip()}")
    assert not wrong, f"{relative(path)}: an import inside a function needs `{REASON} …`: {wrong}"


@each_file
def test_files_and_functions_stay_small(path: Path) -> None:
    length = len(path.read_text().splitlines())
    assert length <= MAY_BE_LONGER.get(relative(path), LONGEST_FILE), f"{relative(path)} has {length} lines: split it"
    for node in ast.walk(parsed(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            assert size <= LONGEST_FUNCTION, f"{relative(path)}: {node.name} has {size} lines: split it"


@each_file
def test_no_global_statement(path: Path) -> None:
    if relative(path) in MAY_SAY_GLOBAL:
        return
    wrong = [f"line {node.lineno}" for node in ast.walk(parsed(path)) if isinstance(node, ast.Global)]
    assert not wrong, f"{relative(path)}: {wrong}"


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
