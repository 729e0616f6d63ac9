"""How good retrieval and answers are, on labelled questions: lines with ``question``, ``pages`` and ``words``."""

from collections.abc import Mapping, Sequence
from typing import Any

import openai

from examples.rag.index import Index, Passage
from examples.rag.orchestrator import Answer

Label = Mapping[str, Any]


def hit(label: Label, passage: Passage) -> bool:
    """Return whether a passage answers a question: it is on one of its pages and has all of its words."""
    text = f"{passage.heading}\n{passage.text}".lower()
    return passage.page in label["pages"] and all(word.lower() in text for word in label["words"])


async def retrieval(client: openai.AsyncOpenAI, index: Index, labels: Sequence[Label]) -> str:
    """Return a line with hit rates at 1 and 4, and the mean reciprocal rank."""
    ranks = []
    for label in labels:
        found = await index.search(client, label["question"], 4)
        ranks.append(next((rank for rank, passage in enumerate(found, 1) if hit(label, passage)), 0))
    count, mean = len(ranks), sum(1 / rank for rank in ranks if rank) / len(ranks)
    first, hits = ranks.count(1) / count, 1 - ranks.count(0) / count
    return f"retrieval  hit@1 {first:.0%}   hit@4 {hits:.0%}   MRR {mean:.2f}   ({count} questions)"


def summary(answers: Sequence[Answer], labels: Sequence[Label]) -> str:
    """Return a line about answers: groundedness, citations, what was late, and the time they took."""
    count, times = len(answers), sorted(answer.seconds for answer in answers)
    pairs = list(zip(answers, labels, strict=False))
    right = sum(any(hit(label, one.sources[number - 1]) for number in one.checked.cited) for one, label in pairs)
    return (
        f"answers    grounded {sum(one.checked.grounded for one in answers) / count:.0%}   "
        f"cited {sum(bool(one.checked.cited) for one in answers)}/{count}   from a right source {right}/{count}   "
        f"by a model {sum(bool(one.model) for one in answers)}/{count}   "
        f"partial {sum(one.partial for one in answers)}   p50 {times[count // 2]:.1f} s, longest {times[-1]:.1f} s"
    )
