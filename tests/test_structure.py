"""Rules of the code base that a reader relies on: sizes, types, imports, supervisor boundaries, model locality."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from omnistage.config.registry import PIPELINES

ROOT = Path(__file__).parent.parent / "omnistage"
FILES = sorted(ROOT.rglob("*.py"))
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8
MAX_NESTING = 3
FRAMEWORK_LINES = 25_000
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
# The only places where any exception is turned into an error of a request, of a replica or of an answer.
SUPERVISORS = {
    "runtime/loop.py": 2,
    "runtime/replica.py": 1,
    "entrypoints/http/app.py": 1,
    "entrypoints/http/video_jobs.py": 1,
    "entrypoints/realtime/socket.py": 1,
    "testing/stagebench.py": 1,
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def functions() -> Iterator[tuple[str, Function]]:
    for file in FILES:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, Function):
                yield f"{name_of(file)}:{node.lineno} {node.name}", node


def depth(node: ast.AST, level: int = 0) -> int:
    deepest = level
    for child in ast.iter_child_nodes(node):
        if isinstance(child, SCOPES):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and child in node.orelse
        deepest = max(deepest, depth(child, level + (isinstance(child, BLOCKS) and not is_elif)))
    return deepest


def test_no_file_is_too_long() -> None:
    assert [name_of(f) for f in FILES if len(f.read_text().splitlines()) > MAX_FILE_LINES] == []


def test_no_function_is_too_long_too_deep_or_takes_too_much() -> None:
    found = []
    for where, node in functions():
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = len([a for a in arguments if a.arg not in ("self", "cls")])
        if lines > MAX_FUNCTION_LINES or count > MAX_PARAMETERS or depth(node) > MAX_NESTING:
            found.append(f"{where}: {lines} lines, {count} parameters, nesting {depth(node)}")
    assert found == []


def test_framework_stays_small() -> None:
    lines = sum(len(f.read_text().splitlines()) for f in FILES if not name_of(f).startswith(("models/", "testing/")))
    assert lines < FRAMEWORK_LINES


def broad(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or (
        isinstance(handler.type, ast.Name) and handler.type.id in ("Exception", "BaseException")
    )


def reraises(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(node, ast.Raise) and node.exc is None for node in ast.walk(handler))


def test_broad_excepts_stand_only_at_the_named_supervisor_boundaries() -> None:
    found: dict[str, int] = {}
    for file in FILES:
        handlers = [node for node in ast.walk(tree_of(file)) if isinstance(node, ast.ExceptHandler)]
        count = sum(broad(handler) and not reraises(handler) for handler in handlers)
        if count:
            found[name_of(file)] = count
    assert found == SUPERVISORS


def test_nothing_asks_an_object_what_it_is_by_string() -> None:
    found = [
        f"{name_of(file)}:{node.lineno}"
        for file in FILES
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("hasattr", "getattr")
    ]
    assert found == []


def called(call: ast.Call) -> str:
    """`name` or `module.name` of what is called; empty for anything else."""
    match call.func:
        case ast.Name(name):
            return name
        case ast.Attribute(ast.Name(module), name):
            return f"{module}.{name}"
    return ""


def test_nothing_unpickles_evaluates_or_loads_torch_archives() -> None:
    banned = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    found = []
    for file in FILES:
        for node in ast.walk(tree_of(file)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{name_of(file)}:{name}" for name in names if name.partition(".")[0] in banned]
            text = called(node) if isinstance(node, ast.Call) else ""
            found += [f"{name_of(file)}:{text}"] if text in ("eval", "exec", "torch.load", "yaml.load") else []
    assert found == []


def test_a_model_is_named_in_its_own_folder_and_one_registry_line() -> None:
    folders = {p.name for p in (ROOT / "models").iterdir() if p.is_dir() and (p / "pipeline.py").exists()}
    found = []
    for file in FILES:
        if name_of(file).startswith("models/") or name_of(file) == "config/registry.py":
            continue
        code = "\n".join(ast.unparse(node) for node in tree_of(file).body if not is_docstring(node))
        found += [f"{name_of(file)}: {folder}" for folder in folders if folder in code]
    assert found == []
    assert len(PIPELINES) == len(set(PIPELINES.values()))


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def test_environment_is_read_nowhere_but_in_the_launcher_and_for_the_terminal() -> None:
    found = {name_of(f) for f in FILES if "os.environ" in f.read_text() or "os.getenv" in f.read_text()}
    assert found <= {"runtime/host.py"}


MODULES = {
    ".".join(file.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): file for file in FILES
}


def imports_of(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Those that run when the module does."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        yield from imports_of(child)


def packages_of(module: str) -> set[str]:
    return {module.rsplit(".", count)[0] for count in range(1, module.count(".") + 1)}


def needs_of(module: str) -> set[str]:
    """Our modules that run, or must have run, when this one is imported; its own packages only where it reads them."""
    named: set[str] = set()
    for node in imports_of(tree_of(MODULES[module])):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif node.module:
            wholes = (f"{node.module}.{alias.name}" for alias in node.names)
            named |= {whole if whole in MODULES else node.module for whole in wholes}
    around = set().union(*(packages_of(name) for name in named)) - packages_of(module)
    return ((named | around) & MODULES.keys()) - {module}


def test_every_module_imports_alone() -> None:
    """No module needs itself through others; a CycleError names them."""
    order = list(TopologicalSorter({module: needs_of(module) for module in MODULES}).static_order())
    assert len(order) == len(MODULES) > 300
    assert (
        order.index("omnistage.payload")
        < order.index("omnistage.config.model")
        < order.index("omnistage.engine.router")
    )
