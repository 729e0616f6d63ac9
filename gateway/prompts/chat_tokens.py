"""How many tokens a chat has for its model: rendered by the model's own chat template, counted by its own tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import orjson
from jinja2 import TemplateError

from contract import manifest as manifests
from contract.errors import EngineFailed, InvalidArgument
from gateway.admission.prompt_tokens import MOST_COUNTED, load_tokenizer, size_by_bytes
from gateway.config.policy import ModelRules
from python_backends.tokenizer.chat_template import ChatTemplate

_CUT_WORD = 64  # tokens


class ChatTokens:
    """max_model_len: the engine's tokens of prompt and output; None if no manifest.json lies beside the tokenizer."""

    def __init__(self, tokenizer_json: Path) -> None:
        folder = tokenizer_json.parent
        self.library = load_tokenizer(tokenizer_json)
        has_manifest = (folder / manifests.FILE_NAME).is_file()
        try:
            self.template = ChatTemplate(folder)
            self.max_model_len = manifests.load(folder).max_seq_len if has_manifest else None
        except (EngineFailed, TemplateError, OSError, ValueError) as exc:
            problem = (
                f"must lie beside a chat template and a manifest.json that can be read, got {tokenizer_json}: {exc}"
            )
            raise InvalidArgument("tokenizer", problem) from exc

    def ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text."""
        # Of the library's methods only those for batches let other threads run meanwhile.
        found: list[int] = self.library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return found

    def fits(self, messages: Sequence[Mapping[str, Any]], tools: str | None, variables: str | None, most: int) -> bool:
        """Return whether a chat's prompt has at most ``most`` tokens. Raises: as ChatTemplate.render."""
        text = self.template.render(orjson.dumps(list(messages)).decode(), tools, variables)
        size = len(text.encode())  # no token is shorter than a byte, and normalizers shorten text at most fourfold
        if size <= most or size > 4 * self._longest_token_bytes * most:
            return size <= most
        # Of a long text the beginning alone mostly says it; where it is cut a word may have a few tokens more.
        head = text[: 8 * most]
        if len(head) < len(text) and len(self.ids(head)) > most + _CUT_WORD:
            return False
        return len(self.ids(text)) <= most

    @cached_property
    def _longest_token_bytes(self) -> int:
        return max(len(token.encode()) for token in self.library.get_vocab(with_added_tokens=True))


@lru_cache(maxsize=64)
def chat_tokens(tokenizer_json: Path) -> ChatTokens:
    """Return the counter of a model, loaded once."""
    return ChatTokens(tokenizer_json)


def context_limit(rules: ModelRules) -> int | None:
    """Return the tokens of prompt and output of a model; None if they, its tokenizer or chat template are not known."""
    if rules.tokenizer is None or chat_tokens(rules.tokenizer).template.source is None:
        return None
    limits = [limit for limit in (rules.context_length, chat_tokens(rules.tokenizer).max_model_len) if limit]
    return min(limits, default=None)


def counted(tokenizer_json: Path | None, texts: Sequence[str]) -> int:
    """Return the tokens of texts without a chat template; estimated without a tokenizer, and beyond MOST_COUNTED."""
    if tokenizer_json is None or sum(map(len, texts)) > MOST_COUNTED:
        return round(size_by_bytes(texts)[0])
    whole = [text.encode(errors="replace").decode() for text in texts]  # JSON can hold lone surrogates
    return sum(map(len, load_tokenizer(tokenizer_json).encode_batch_fast(whole, add_special_tokens=False)))
