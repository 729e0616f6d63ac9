"""A small index over the project's pages: cut at headings, embedded once, searched by cosine and reranked."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openai

MAX_CHARACTERS = 700  # of a passage: about the 256 tokens that the encoder reads
_AT_ONCE = 64
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)  # its comments are no headings
_SKIPPED = ("modules.md", "recipes.md", "study-internet-scale.md")  # lists, and a text that is no documentation


@dataclass(frozen=True)
class Passage:
    """A piece of a page. page: its file's name. heading: the nearest one above it."""

    page: str
    heading: str
    text: str


def passages(folder: Path) -> list[Passage]:
    """Return the passages of all pages in a folder, each text once."""
    found: dict[str, Passage] = {}
    for path in sorted(set(folder.glob("*.md")) - {folder / name for name in _SKIPPED}):
        title = heading = path.stem
        text = _CODE.sub(lambda code: code[0].replace("\n#", "\n #"), path.read_text("utf-8"))
        for section in re.split(r"^(?=#{1,4} )", text, flags=re.MULTILINE):
            first, _, rest = section.partition("\n")
            if first.startswith("#"):
                heading, section = first.lstrip("# ").strip(), rest
                title, heading = (heading, heading) if first.startswith("# ") else (title, f"{title}: {heading}")
            for text in _pieces(section):
                found.setdefault(" ".join(text.split()), Passage(path.name, heading, text))
    return list(found.values())


def plain(line: str) -> str:
    """Return a line without the marks of links, tables and code."""
    return re.sub(r"\[([^\]]+)\]\([^)]*\)|[|`]|\*\*", r"\1", re.sub(r"\|-[|-]*\|", "", line)).strip()


def _pieces(section: str) -> Iterable[str]:
    """Yield texts of at most MAX_CHARACTERS, cut between lines."""
    piece = ""
    for line in section.splitlines():
        line = plain(line)
        if len(piece) + len(line) > MAX_CHARACTERS:
            yield piece.strip()
            piece = ""
        piece += line[:MAX_CHARACTERS] + "\n"
    if len(piece.split()) >= 5:  # fewer words say nothing
        yield piece.strip()


@dataclass
class Index:
    """Passages and their vectors, of length 1. model: of /embeddings. reranker: of /rerank, "" for the same."""

    passages: list[Passage]
    vectors: np.ndarray
    model: str
    reranker: str = ""

    @classmethod
    async def build(cls, client: openai.AsyncOpenAI, model: str, folder: Path, cache: Path) -> Index:
        """Embed the passages of a folder. cache: of vectors, by text and model; another model embeds anew."""
        found = passages(folder)
        texts = [f"{passage.heading}\n{passage.text}" for passage in found]
        keys = [hashlib.sha256(f"{model}\n{text}".encode()).hexdigest() for text in texts]
        known: dict[str, np.ndarray] = {}
        with contextlib.suppress(FileNotFoundError):
            known = dict(np.load(cache))
        missing = [place for place, key in enumerate(keys) if key not in known]
        for start in range(0, len(missing), _AT_ONCE):
            places = missing[start : start + _AT_ONCE]
            vectors = await _embedded(client, model, [texts[place] for place in places])
            known |= {keys[place]: vector for place, vector in zip(places, vectors, strict=True)}
        if missing:
            np.savez(cache, **{key: known[key] for key in keys})
        return cls(found, np.stack([known[key] for key in keys]), model)

    async def search(self, client: openai.AsyncOpenAI, query: str, count: int) -> list[Passage]:
        """Return the nearest passages: four times as many by cosine, of these the best by /rerank."""
        [vector] = await _embedded(client, self.model, [query])
        nearest = [self.passages[place] for place in np.argsort(-(self.vectors @ vector))[: 4 * count]]
        body: dict[str, object] = {"query": query, "top_n": count, "truncate_prompt_tokens": -1}
        body["model"] = self.reranker or self.model
        body["documents"] = [f"{one.heading}\n{one.text}" for one in nearest]
        answer = await client.post("/rerank", cast_to=dict, body=body)
        return [nearest[result["index"]] for result in answer["results"]]


async def _embedded(client: openai.AsyncOpenAI, model: str, texts: list[str]) -> np.ndarray:
    whole = {"encoding_format": "float", "truncate_prompt_tokens": -1}
    answer = await client.embeddings.create(model=model, input=texts, extra_body=whole)
    vectors = np.array([entry.embedding for entry in answer.data], np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
