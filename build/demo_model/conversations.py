"""Chat examples made from the training modules: what a documented function does, and how it is written.

They give the chat template a meaning: after them `<|assistant|>` is followed by an answer and the answer by `<|end|>`.
A stable hash of each function's qualified name chooses its question, so that the examples are the same every time.
"""

import ast
import hashlib
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from build.demo_model.corpus import Document

SYSTEM_PROMPT = "You know the Python standard library."
MAX_ANSWER_CHARACTERS = 1500
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Conversation:
    """One question and its answer; `system` is empty where there is no system turn."""

    system: str
    user: str
    assistant: str

    def rendered(self) -> str:
        """As the chat template writes it, without the <|endoftext|> that begins every document."""
        system = f"<|system|>{self.system}<|end|>" if self.system else ""
        return f"{system}<|user|>{self.user}<|end|><|assistant|>{self.assistant}<|end|>"


def documented_functions(tree: ast.Module) -> Iterator[tuple[str, FunctionNode, str]]:
    """(qualified name, node, first paragraph of the docstring) of the functions of a module and of its classes."""
    pending: list[tuple[str, ast.AST]] = [("", node) for node in tree.body]
    while pending:
        prefix, node = pending.pop(0)
        if isinstance(node, ast.ClassDef):
            pending = [(f"{prefix}{node.name}.", child) for child in node.body] + pending
        elif isinstance(node, FunctionNode):
            docstring = ast.get_docstring(node)
            if docstring and docstring.strip():
                yield f"{prefix}{node.name}", node, docstring.strip().split("\n\n")[0]


def signature(node: FunctionNode) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{kind} {node.name}({ast.unparse(node.args)}){returns}:"


def function_source(lines: list[str], node: FunctionNode) -> str:
    """The function as it stands in its module's lines, without decorators, dedented: `ast.get_source_segment` would
    split the whole module anew for every function."""
    assert node.end_lineno is not None
    last = lines[node.end_lineno - 1].encode()[: node.end_col_offset].decode()
    return inspect.cleandoc("\n".join(["", *lines[node.lineno - 1 : node.end_lineno - 1], last]))


def conversations_of(document: Document) -> Iterator[Conversation]:
    """About half of the documented functions of one module become one conversation each."""
    if not document.path.endswith(".py"):
        return
    lines = document.text.split("\n")
    module = document.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for name, node, summary in documented_functions(ast.parse(document.text)):
        digest = hashlib.sha256(f"{module}.{name}".encode()).digest()
        source = function_source(lines, node)
        question, answer = {
            0: (f"What does `{name}` in the module `{module}` do?", summary),
            1: (f"Write `{signature(node)}`", source),
            2: (f"Write a Python function `{node.name}`: {summary.splitlines()[0]}", source),
        }.get(digest[0] % 6, ("", ""))
        if answer and len(answer) <= MAX_ANSWER_CHARACTERS:
            yield Conversation(SYSTEM_PROMPT if digest[1] % 4 == 0 else "", question, answer)


def conversations(documents: Iterable[Document]) -> tuple[Conversation, ...]:
    return tuple(conversation for document in documents for conversation in conversations_of(document))
