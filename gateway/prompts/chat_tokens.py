"""How many tokens a chat has for its model: rendered by the model's own chat template, counted by its own tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from contract import manifest as manifests
from gateway.admission.prompt_tokens import load_tokenizer, size_by_bytes
from python_backends.tokenizer.chat_template import ChatTemplate


class ChatTokens:
    """max_model_len: the engine's tokens of prompt and output; None if no manifest.json lies beside the tokenizer."""

    def __init__(self, tokenizer_json: Path) -> None:
        folder = tokenizer_json.parent
        self.library = load_tokenizer(tokenizer_json)
        self.template = ChatTemplate(folder)
        has_manifest = (folder / manifests.FILE_NAME).is_file()
        self.max_model_len = manifests.load(folder).max_seq_len if has_manifest else None

    def ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text."""
        # Of the library's methods only those for batches let other threads run meanwhile.
        found: list[int] = self.library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return found

    def count(self, messages: Sequence[Mapping[str, Any]], tools: str | None, variables: str | None) -> int:
        """Return the tokens of a chat's prompt. tools, variables: JSON. Raises: as ChatTemplate.render."""
        return len(self.ids(self.template.render(orjson.dumps(list(messages)).decode(), tools, variables)))


@lru_cache(maxsize=64)
def chat_tokens(tokenizer_json: Path) -> ChatTokens:
    """Return the counter of a model, loaded once."""
    return ChatTokens(tokenizer_json)


def counted(tokenizer_json: Path | None, texts: Sequence[str]) -> int:
    """Return the tokens of texts without a chat template; estimated from their bytes without a tokenizer."""
    if tokenizer_json is None:
        return round(size_by_bytes(texts)[0])
    whole = [text.encode(errors="replace").decode() for text in texts]  # JSON can hold lone surrogates
    return sum(map(len, load_tokenizer(tokenizer_json).encode_batch_fast(whole, add_special_tokens=False)))
