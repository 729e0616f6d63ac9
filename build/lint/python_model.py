"""What can be wrong with the program of a Python model: no file, a file that does not compile, no TritonPythonModel."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from build.lint.repository import ERROR, Fault, Model

CLASS, DEFAULT_FILE = "TritonPythonModel", "model.py"


def python_faults(model: Model) -> Iterator[Fault]:
    """Every fault of the program that Triton's Python backend loads, in every version folder."""
    if model.config is None or model.config.backend != "python":
        return
    name = model.config.default_model_filename or DEFAULT_FILE
    for version in sorted(path for path in model.folder.iterdir() if path.is_dir() and path.name.isdigit()):
        problem = _problem(version / name)
        if problem:
            yield Fault(model.name, "program", ERROR, f"{version.name}/{name} {problem}")


def _problem(path: Path) -> str:
    """Why the Python backend cannot load the file; "" if it can as far as its text tells."""
    if not path.is_file():
        return "is missing: the Python backend has no program to load"
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError as exc:
        where = f" (line {exc.lineno})" if exc.lineno else ""
        return f"does not compile: {exc.msg}{where}"
    except (OSError, ValueError) as exc:
        return f"cannot be read: {exc}"
    # Names that statements of the module's own level bind, those within if and try included.
    names = {name for node in _statements(tree.body) for name in _bound(node)}
    if CLASS not in names and "*" not in names:
        return f"defines no class {CLASS}"
    for node in _statements(tree.body):
        if isinstance(node, ast.ClassDef) and node.name == CLASS and not node.bases:
            methods = {name for member in node.body for name in _bound(member)}
            if "execute" not in methods:
                return f"has a class {CLASS} without execute()"
    return ""


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            handlers = [statement for handler in getattr(node, "handlers", []) for statement in handler.body]
            inner = [*node.body, *getattr(node, "orelse", []), *handlers, *getattr(node, "finalbody", [])]
            yield from _statements(inner)


def _bound(node: ast.stmt) -> Iterator[str]:
    """Names a statement binds where it stands."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from ((alias.asname or alias.name) for alias in node.names)
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))
