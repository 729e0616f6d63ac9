"""What a model is that turns texts into vectors, or pairs of texts into scores, and how Triton serves it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EMBEDDING, RERANK = "embedding", "rerank"
KINDS = (EMBEDDING, RERANK)  # of engines, in their manifests
MODEL = "encoder"  # Triton's name of the model that serves them
MAX_ROWS = 64  # texts or pairs of one Triton request: max_batch_size in its config.pbtxt
POOLINGS = ("mean", "cls", "last")


@dataclass(frozen=True)
class Encoder:
    """What serving needs to know of an encoder beside its weights: the field ``encoder`` of its manifest.

    pooling: how the vectors of a text's tokens become one: mean, cls (of the first token) or last (of the last).
    normalize: whether embeddings have length 1.
    dimensions: of an embedding; 1 for a reranker, whose output is a score.
    matryoshka_dimensions: to which an embedding may be cut; empty for a model that was not trained for it.
    prompts: texts put before an input, by name; default_prompt is the name of the one that is put before an input
        without a name, "" for none.
    template: what stands before, between and after the texts of a pair: (before, body with {query} and {document},
        after); empty where the tokenizer itself joins a pair.
    token_types: whether the model tells the two texts of a pair apart by token types.
    """

    pooling: str
    normalize: bool
    dimensions: int
    matryoshka_dimensions: tuple[int, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    template: tuple[str, ...] = ()
    token_types: bool = False

    @classmethod
    def from_manifest(cls, table: Mapping[str, Any]) -> Encoder:
        """Read the field ``encoder`` of a manifest."""
        listed = {name: tuple(table[name]) for name in ("matryoshka_dimensions", "template")}
        return cls(**{**table, **listed})
