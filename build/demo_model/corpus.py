"""The training text: the standard library of the CPython that runs this file.

Every machine that can run this project has this text, and the PSF licence lets it be learnt from and passed on.
A document is one source file, or one topic of the language reference that `help()` shows (pydoc_data/topics.py,
unpacked to prose). Order and split depend on module paths alone, so one CPython release gives one corpus.

Left out: `test` and `tests` folders (19 MB of assertions would be two thirds of the text and teach little else),
site-packages, character-mapping tables, machine-written configuration, and bundled wheels.
"""

import ast
import hashlib
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_ONE_IN = 16  # about 6 % of modules, whole files, are never seen in training

SKIPPED_FOLDERS = frozenset("site-packages dist-packages test tests idle_test __pycache__ lib-dynload _bundled".split())
SKIPPED_FILE_PREFIXES = ("_sysconfigdata", "_sysconfig_vars")
TABLE_PREFIXES = ("cp", "iso8859", "koi8", "mac_", "big5", "euc_", "gb", "hp_roman", "johab", "kz1048", "shift", "tis")
TOPICS = "pydoc_data/topics.py"


@dataclass(frozen=True)
class Document:
    """One text. `path` is relative to the standard library, with forward slashes; `topics.py#name` for a topic."""

    path: str
    text: str

    @property
    def size_bytes(self) -> int:
        return len(self.text.encode())


@dataclass(frozen=True)
class Corpus:
    """The two sides of the split, each ordered by path."""

    training: tuple[Document, ...]
    held_out: tuple[Document, ...]


def is_included(relative: Path) -> bool:
    """Whether the source file at this path inside the standard library belongs to the corpus."""
    if relative.suffix != ".py" or SKIPPED_FOLDERS.intersection(relative.parts[:-1]):
        return False
    if relative.parts[0].startswith("config-") or relative.name.startswith(SKIPPED_FILE_PREFIXES):
        return False
    return not (relative.parts[0] == "encodings" and relative.name.startswith(TABLE_PREFIXES))


def is_held_out(path: str) -> bool:
    """A module is held out by the hash of its path, so that the split survives additions to the library."""
    if path.startswith(TOPICS):
        return False  # the reference is prose; held-out bits per byte are measured on modules
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


def read_source(file: Path) -> str | None:
    """The file's text in its declared encoding with \\n line ends; None where it has no valid encoding or no text."""
    try:
        with tokenize.open(file) as source:
            text = source.read()
    except (SyntaxError, UnicodeDecodeError):
        return None
    return text if text.strip() else None


def topic_documents(source: str) -> Iterator[Document]:
    """The prose inside pydoc_data/topics.py: one document per topic of the language reference."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for name, text in sorted(ast.literal_eval(node.value).items()):
                yield Document(f"{TOPICS}#{name}", text)


def documents(folder: Path) -> Iterator[Document]:
    """Every document of the library in `folder`, ordered by path."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    for name in sorted(files):
        if not is_included(Path(name)):
            continue
        text = read_source(files[name])
        if text is None:
            continue
        if name == TOPICS:
            yield from topic_documents(text)
        else:
            yield Document(name, text)


def gather(folder: Path | None = None) -> Corpus:
    """Read and split the standard library (of the running CPython, unless a folder is given).

    A text that occurs twice is kept once, on the training side if it occurs there: a held-out copy would be no test.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    everything = list(documents(folder))
    seen: set[str] = set()
    sides: dict[bool, list[Document]] = {False: [], True: []}
    for held_out in (False, True):
        for document in everything:
            if is_held_out(document.path) is held_out and document.text not in seen:
                seen.add(document.text)
                sides[held_out].append(document)
    if not sides[False] or not sides[True]:
        raise FileNotFoundError(f"{folder}: too few .py files to train on some and hold out others")
    return Corpus(tuple(sides[False]), tuple(sides[True]))
