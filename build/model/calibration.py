"""Texts to calibrate and to evaluate on, and the token blocks made of them.

``read_texts`` takes a local file or folder, the CPython standard library (``cpython``; its held-out modules are the
``test`` split), or ``cnn_dailymail``. A folder is read as ``datasets.load_dataset`` would and as ``quantize.py`` needs
it: split ``train``, column ``text`` (rule R21); so one folder serves our stage and NVIDIA's script.
"""

import csv
import hashlib
import json
import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from build.base.checkpoint import Checkpoint
from build.demo_model import corpus
from contract.errors import InvalidArgument

CPYTHON = "cpython"
CNN_DAILYMAIL = "cnn_dailymail"
SPLIT_WORDS = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation", "validation", "valid", "val", "dev", "heldout"),
}
SUFFIXES = (".jsonl", ".json", ".csv", ".txt")

Encode = Callable[[str], Sequence[int]]
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class TokenBlocks:
    """ids: i64[n, t], n sequences of t tokens, no padding. texts: how many texts went into them."""

    ids: np.ndarray
    texts: int

    @property
    def sha256(self) -> str:
        """Of the shape and the ids, so that two calibrations can be told apart."""
        return hashlib.sha256(repr(self.ids.shape).encode() + self.ids.astype("<i8").tobytes()).hexdigest()


def read_texts(dataset: str, split: str = "train") -> list[str]:
    """The non-empty texts of a data set, in a fixed order. split: ``train`` or ``test``. Raises InvalidArgument."""
    path = Path(os.path.expanduser(dataset))  # unlike Path's own, it leaves an unknown ~USER as it is
    if dataset == CPYTHON:
        sides = corpus.gather()  # the demo model's own split: what it was trained on, and what it never saw
        texts = [document.text for document in (sides.training if split == "train" else sides.held_out)]
    elif path.exists():
        # quantize.py takes any path with this name for the data set itself, whose texts are its articles.
        column = "article" if CNN_DAILYMAIL in dataset else "text"
        texts = [text for file in _files(path, split) for text in _read_file(file, column)]
    elif Path(dataset).name == CNN_DAILYMAIL:
        texts = _cnn_dailymail(dataset, split)
    else:
        problem = f"{dataset!r} is neither a local file or folder nor {CPYTHON!r} nor {CNN_DAILYMAIL!r} (rule R21)"
        raise InvalidArgument("calibration.dataset", problem)
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise InvalidArgument("calibration.dataset", f"{dataset} holds no text in split {split!r}")
    return texts


def token_blocks(
    texts: list[str],
    encode: Encode,
    *,
    size: int,
    max_seq_length: int,
    separator_id: int | None = None,
    seed: int = 1234,
) -> TokenBlocks:
    """Up to ``size`` sequences of ``max_seq_length`` tokens; one shorter one where all texts together are too short.

    Texts come in an order drawn from ``seed`` and in pieces of at most max_seq_length tokens: first the beginning of
    every text, so that no long one fills the set, then the second pieces, and so on. Pieces are packed end to end
    with ``separator_id`` before each: without padding, no statistic is taken of tokens that a request never holds.
    """
    order = list(range(len(texts)))
    random.Random(seed).shuffle(order)
    separator = [] if separator_id is None else [separator_id]
    stream: list[int] = []
    encoded: dict[int, Sequence[int]] = {}
    start = 0  # of the pieces, in their texts
    while len(stream) < size * max_seq_length and order:
        for index in order:
            if len(stream) >= size * max_seq_length:
                break
            if index not in encoded:
                encoded[index] = encode(texts[index])
            if piece := encoded[index][start : start + max_seq_length]:
                stream += [*separator, *piece]
        start += max_seq_length
        order = [index for index in order if len(encoded.get(index, ())) > start]
    if not stream:
        raise InvalidArgument("calibration.dataset", "its texts have no tokens")
    width = min(max_seq_length, len(stream))
    count = min(size, len(stream) // width)
    used = sum(map(bool, encoded.values()))
    return TokenBlocks(np.asarray(stream[: count * width], dtype=np.int64).reshape(count, width), used)


def read_blocks(
    opened: Checkpoint, dataset: str, split: str = "train", *, size: int, max_seq_length: int, seed: int = 1234
) -> TokenBlocks:
    """``token_blocks`` of a data set's texts in the model's own tokens. Raises InvalidArgument."""
    encode, _, separator_id = open_tokenizer(opened)
    texts, vocab_size = read_texts(dataset, split), opened.architecture.vocab_size
    blocks = token_blocks(texts, encode, size=size, max_seq_length=max_seq_length, separator_id=separator_id, seed=seed)
    if blocks.ids.max() >= vocab_size:
        problem = f"the tokenizer gives id {blocks.ids.max()}; the model's vocabulary has {vocab_size}"
        raise InvalidArgument("model", problem)
    return blocks


def open_tokenizer(opened: Checkpoint) -> tuple[Encode, Decode, int | None]:
    """(encode without special tokens, decode, the id that stands between texts: begin-of-text, else end-of-text)."""
    import tokenizers  # not needed by a caller who brings token ids

    tokenizer = tokenizers.Tokenizer.from_file(str(opened.folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    separator_id = next(iter(opened.eos_token_ids), None) if opened.bos_token_id is None else opened.bos_token_id

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    return encode, decode, separator_id


def _files(path: Path, split: str) -> list[Path]:
    """The files of a split. Names decide, as in ``datasets``: where none names a split, all files are ``train``."""
    if path.is_file():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if not files:
        raise InvalidArgument("calibration.dataset", f"{path} holds no {', '.join(SUFFIXES)} file")
    named = {file: _split_of(file.relative_to(path)) for file in files}
    if not any(named.values()):
        named = dict.fromkeys(files, "train")
    chosen = [file for file in files if named[file] == split]
    if not chosen:
        there = sorted({name for name in named.values() if name})
        problem = f"{path} has no split {split!r}; it has {', '.join(there)} (rule R21)"
        raise InvalidArgument("calibration.dataset", problem)
    return chosen


def _split_of(relative: Path) -> str | None:
    for part in (relative.stem, *reversed(relative.parts[:-1])):
        words = part.lower().replace(".", " ").replace("-", " ").replace("_", " ").split() + [part.lower()]
        for split, names in SPLIT_WORDS.items():
            if any(word in names for word in words):
                return split
    return None


def _read_file(file: Path, column: str) -> Iterable[str]:
    try:
        if file.suffix == ".txt":
            return [file.read_text(encoding="utf-8-sig")]
        rows: list[tuple[int, object]]
        if file.suffix == ".csv":
            csv.field_size_limit(max(csv.field_size_limit(), file.stat().st_size))  # else 131,072 characters of a text
            with file.open(newline="", encoding="utf-8-sig") as table:
                rows = list(enumerate(csv.DictReader(table), 2))
        elif file.suffix == ".jsonl":
            lines = file.read_text(encoding="utf-8-sig").split("\n")
            rows = [(number, json.loads(line)) for number, line in enumerate(lines, 1) if line.strip()]
        elif file.suffix == ".json":
            rows = list(enumerate(json.loads(file.read_text(encoding="utf-8-sig")), 1))
        else:
            raise InvalidArgument("calibration.dataset", f"must be a {', '.join(SUFFIXES)} file, got {file}")
    except (ValueError, TypeError, RecursionError, csv.Error) as exc:
        raise InvalidArgument("calibration.dataset", f"{file} is not valid {file.suffix[1:]} in UTF-8: {exc}") from exc
    return [_text_of(row, column, file, number) for number, row in rows]


def _text_of(row: object, column: str, file: Path, number: int) -> str:
    if isinstance(row, dict) and isinstance(row.get(column), str):
        return row[column]
    there = f"its columns are {', '.join(map(str, row))}" if isinstance(row, dict) else f"it is a {type(row).__name__}"
    problem = f"{file}, row {number}: no text in column {column!r}; {there} (rule R21)"
    raise InvalidArgument("calibration.dataset", problem)


def _cnn_dailymail(dataset: str, split: str) -> list[str]:
    try:
        import datasets
    except ImportError as exc:
        problem = f"{dataset} must be downloaded, for which the package `datasets` is missing here"
        instead = f"give a local folder with split train and a text column, or {CPYTHON!r}"
        raise InvalidArgument("calibration.dataset", f"{problem}; {instead}") from exc
    return list(datasets.load_dataset(dataset, "3.0.0", split=split)["article"])
