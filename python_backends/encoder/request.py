"""One Triton request of the encoder: its tensors checked, as rows of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from contract.encoder import EMBEDDING, RERANK, Encoder
from contract.errors import InvalidArgument
from python_backends.encoder.tokens import Row, Tokens
from python_backends.triton_io import Inputs

NO_ID = -1  # fills input_ids behind a row that is shorter than the longest


@dataclass(frozen=True)
class EncoderRequest:
    """rows: of tokens; of an embedding model's pairs those of all queries, then those of all documents.

    count: texts or pairs. dimensions: of the embeddings. scored: whether scores are returned, not embeddings.
    """

    rows: tuple[Row, ...]
    count: int
    dimensions: int
    scored: bool


def parse(inputs: Inputs, kind: str, encoder: Encoder, tokens: Tokens) -> EncoderRequest:
    """Read one request. Raises InvalidArgument: a field holds what it may not; names it, with the row where it is one
    row's."""
    longest: int | None = _of_all("truncate_prompt_tokens", inputs.values("truncate_prompt_tokens"))
    if longest is not None and longest != -1 and not 1 <= longest <= tokens.max_seq_len:
        problem = f"must be -1 or 1 to {tokens.max_seq_len}, the model's limit, got {longest}"
        raise InvalidArgument("truncate_prompt_tokens", problem)
    longest = tokens.max_seq_len if longest == -1 else longest
    dimensions = _dimensions(inputs, encoder)
    ids, texts, pairs = inputs.array("input_ids"), inputs.texts("text_input"), inputs.texts("text_pair")
    if (ids is None) == (not texts):
        raise InvalidArgument("text_input", "must be sent, or input_ids in its place, got both or neither")
    if kind == RERANK and (ids is not None or not pairs):
        raise InvalidArgument("text_pair", "must be sent with text_input: this model scores pairs of texts, no others")
    if ids is not None:
        if pairs:
            raise InvalidArgument("text_pair", "must be left out with input_ids, got both")
        rows = tokens.ids("input_ids", [_given(row) for row in ids.tolist()], longest)
        return EncoderRequest(tuple(rows), len(rows), dimensions, False)
    if not pairs:
        rows = tokens.texts("text_input", _prompted(inputs, encoder, texts), longest)
        return EncoderRequest(tuple(rows), len(texts), dimensions, False)
    if len(pairs) != len(texts):
        problem = f"must have one entry for each of text_input, {len(texts)}, got {len(pairs)}"
        raise InvalidArgument("text_pair", problem)
    if kind == EMBEDDING:
        queries = [encoder.prompts.get("query", "") + text for text in texts]
        documents = [encoder.prompts.get("document", "") + text for text in pairs]
        rows = tokens.texts("text_input", queries, longest) + tokens.texts("text_pair", documents, longest)
    else:
        rows = tokens.pairs("text_pair", list(zip(texts, pairs, strict=True)), longest)
    return EncoderRequest(tuple(rows), len(texts), dimensions, True)


def _given(row: list[int]) -> list[int]:
    while row and row[-1] == NO_ID:
        row.pop()
    return row


def _dimensions(inputs: Inputs, encoder: Encoder) -> int:
    requested: int | None = _of_all("dimensions", inputs.values("dimensions"))
    if requested is None:
        return encoder.dimensions
    allowed = *encoder.matryoshka_dimensions, encoder.dimensions
    if requested not in allowed:
        why = "" if len(allowed) > 1 else ": the model was not trained for shorter embeddings"
        raise InvalidArgument("dimensions", f"must be {' or '.join(map(str, allowed))}, got {requested}{why}")
    return requested


def _prompted(inputs: Inputs, encoder: Encoder, texts: Sequence[str]) -> list[str]:
    """Return the texts, each behind the prompt that the request names, or behind the model's default."""
    named: str | None = _of_all("prompt_name", inputs.texts("prompt_name"))
    name = encoder.default_prompt if named is None else named
    if name and name not in encoder.prompts:
        allowed = ", ".join(encoder.prompts) or "none, the model has no prompts"
        raise InvalidArgument("prompt_name", f"must be one of {allowed}, got {name!r:.100}")
    prompt = encoder.prompts[name] if name else ""
    return [prompt + text for text in texts]


def _of_all(name: str, values: Sequence[Any]) -> Any:
    """Return the value that all rows have, None without rows."""
    if len(set(values)) > 1:
        raise InvalidArgument(name, f"must be the same in every row, got {', '.join(map(repr, values)):.200}")
    return values[0] if values else None
