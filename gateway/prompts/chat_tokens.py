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
from contract.generation import GenerationRequest
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
            problem = "must lie beside a chat template and a manifest.json that can be read"
            raise InvalidArgument("tokenizer", f"{problem}, got {tokenizer_json}: {exc}") from exc

    def ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text."""
        # Of the library's methods only those for batches let other threads run meanwhile.
        found: list[int] = self.library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return found

    def fits(self, messages: Sequence[Mapping[str, Any]], tools: str | None, variables: str | None, most: int) -> bool:
        """Return whether a chat's prompt has at most ``most`` tokens. Raises: as ChatTemplate.render."""
        text = self.template.render(orjson.dumps(list(messages)).decode(), tools, variables)
        return len(text.encode()) <= most or self._count(text, most) is not None  # no token is shorter than a byte

    def prompt(self, request: GenerationRequest, most: int) -> int | None:
        """Return the tokens of a prompt; None if it has more than ``most``. Raises: as ChatTemplate.render."""
        if request.input_ids is not None:
            return len(request.input_ids) if len(request.input_ids) <= most else None
        if request.messages is None:
            return self._count(request.text_input or "", most, add_special_tokens=True)
        messages = orjson.dumps(request.messages).decode()
        return self._count(self.template.render(messages, request.tools, request.chat_template_kwargs), most)

    def _count(self, text: str, most: int, add_special_tokens: bool = False) -> int | None:
        """Return the tokens of a text; None if it has more than ``most``."""
        if len(text.encode()) > 4 * self._longest_token_bytes * most:  # normalizers shorten text at most fourfold
            return None
        # Of a long text the beginning alone mostly says it; where it is cut a word may have a few tokens more.
        head = text[: 8 * most]
        if len(head) < len(text) and len(self.ids(head)) > most + _CUT_WORD:
            return None
        count = len(self.ids(text, add_special_tokens))
        return count if count <= most else None

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
    return context_length(rules)


def context_length(rules: ModelRules) -> int | None:
    """Return the tokens of prompt and output of a model, its chat template known or not; None if they are not."""
    of_engine = chat_tokens(rules.tokenizer).max_model_len if rules.tokenizer is not None else None
    return min((limit for limit in (rules.context_length, of_engine) if limit), default=None)


def prompt_bytes(request: GenerationRequest) -> int:
    """Return the bytes of a prompt, at least as many as it has tokens but for what a chat template adds."""
    if request.input_ids is not None:
        return len(request.input_ids)
    return len(orjson.dumps(request.messages or request.text_input)) + len(request.tools or "")


def counted(tokenizer_json: Path | None, texts: Sequence[str]) -> int:
    """Return the tokens of texts without a chat template; estimated without a tokenizer, and beyond MOST_COUNTED."""
    if tokenizer_json is None or sum(map(len, texts)) > MOST_COUNTED:
        return round(size_by_bytes(texts)[0])
    whole = [text.encode(errors="replace").decode() for text in texts]  # JSON can hold lone surrogates
    return sum(map(len, load_tokenizer(tokenizer_json).encode_batch_fast(whole, add_special_tokens=False)))
