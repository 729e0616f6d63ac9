"""Serve /tokenize, /detokenize and /tokenizer_info in vLLM's forms: the models' tokenizers, without an engine."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from pydantic import ConfigDict, Field, StrictBool, StrictStr
from starlette.requests import Request

from contract.chat import check_tool_turns
from contract.errors import InvalidArgument, ModelNotFound, PromptTooLong
from gateway.api import openai_http, schemas
from gateway.api.openai_http import OpenAIEndpoint
from gateway.api.response_stream import ResponseStream
from gateway.api.schemas import EntryLimit, Message, TokenId
from gateway.api.strict_model import LevelLimit, StrictModel
from gateway.api.tool_schemas import Tools, plain_tools
from gateway.config.tenant import Tenant
from gateway.prompts.chat_tokens import chat_tokens
from gateway.service import Service

MAX_BYTES = 1024 * 1024  # of a text, or of a chat as JSON
MAX_IDS = 256 * 1024
_AT_ONCE = 2  # texts and ids in work; more wait

_OF_CHATS = ("messages", "tools", "chat_template_kwargs")  # left out with a prompt
_ONE_PROMPT: list[Any] = [
    {
        "required": ["prompt"],
        "properties": {"prompt": {"type": "string"}, **dict.fromkeys(_OF_CHATS, {"type": "null"})},
    },
    {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}}},
]


class TokenizeRequest(StrictModel):
    """The body of POST /tokenize.

    prompt: a text; exactly one of prompt and messages is set.
    add_special_tokens: those of the tokenizer; by default for a text only, because a chat template writes its own.
    return_token_strs: return the tokens as the vocabulary writes them, too.
    """

    model_config = ConfigDict(json_schema_extra={"anyOf": _ONE_PROMPT})
    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True), EntryLimit] | None = None
    tools: Tools | None = None
    chat_template_kwargs: Annotated[dict[str, Any], LevelLimit, EntryLimit] | None = None
    add_special_tokens: StrictBool | None = None
    add_generation_prompt: StrictBool = True
    continue_final_message: Literal[False] = False
    return_token_strs: StrictBool = False


class DetokenizeRequest(StrictModel):
    """The body of POST /detokenize. tokens: ids; special tokens become text as well."""

    model: StrictStr | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


BODIES: dict[str, type[TokenizeRequest] | type[DetokenizeRequest]] = {
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


class ModelTokenizer:
    """The tokenizer of one model, and what lies beside it."""

    def __init__(self, tokenizer_json: Path) -> None:
        self._chat = chat_tokens(tokenizer_json)
        config = tokenizer_json.parent / "tokenizer_config.json"
        self._config: dict[str, Any] = json.loads(config.read_text("utf-8")) if config.is_file() else {}

    def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """Return the response to ``body``. Raises: InvalidArgument, or NotFound for a chat without a template."""
        if (body.prompt is None) == (body.messages is None):
            raise InvalidArgument("prompt", "must be sent if messages is not, and left out if it is")
        for name in _OF_CHATS:
            if body.messages is None and getattr(body, name):
                raise InvalidArgument(name, "must be left out without messages")
        text, special = body.prompt, body.add_special_tokens is not False
        if body.messages is not None:
            text, special = self._rendered(body), body.add_special_tokens is True
        assert text is not None
        if len(text.encode()) > MAX_BYTES:
            name = "prompt" if body.messages is None else "messages"
            raise PromptTooLong(name, f"must have at most {MAX_BYTES} bytes, got {len(text.encode())}")
        ids = self._chat.ids(text, special)
        strings = [self._chat.library.id_to_token(token) for token in ids] if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": self._chat.max_model_len, "tokens": ids, "token_strs": strings}

    def detokenize(self, body: DetokenizeRequest) -> dict[str, Any]:
        """Return the response to ``body``. Raises: InvalidArgument."""
        if len(body.tokens) > MAX_IDS:
            raise PromptTooLong("tokens", f"must hold at most {MAX_IDS} ids, got {len(body.tokens)}")
        size = self._chat.library.get_vocab_size(with_added_tokens=True)
        wrong = next((token for token in body.tokens if token >= size), None)
        if wrong is not None:
            raise InvalidArgument("tokens", f"must hold ids from 0 to {size - 1}, got {wrong}")
        return {"prompt": self._chat.library.decode_batch([body.tokens], skip_special_tokens=False)[0]}

    def info(self) -> dict[str, Any]:
        """Return the response of /tokenizer_info: special tokens as texts, the chat template, and the class."""
        tokens = {name: text for name, text in self._chat.template.tokens.items() if text}
        about = {"tokenizer_class": self._config.get("tokenizer_class"), "chat_template": self._chat.template.source}
        return {**about, **tokens, "max_model_len": self._chat.max_model_len}

    def _rendered(self, body: TokenizeRequest) -> str:
        messages = [message.plain(f"messages.{index}") for index, message in enumerate(body.messages or ())]
        check_tool_turns(tuple(messages))
        tools = orjson.dumps(plain_tools(body.tools)).decode() if body.tools else None
        variables = orjson.dumps(body.chat_template_kwargs).decode() if body.chat_template_kwargs else None
        data = orjson.dumps(messages)
        if len(data) > MAX_BYTES:
            raise PromptTooLong("messages", f"must have at most {MAX_BYTES} bytes, got {len(data)}")
        return self._chat.template.render(data.decode(), tools, variables, body.add_generation_prompt)


@lru_cache(maxsize=64)
def model_tokenizer(tokenizer_json: Path | None) -> ModelTokenizer:
    """Return a model's tokenizer, loaded once. Raises: ModelNotFound if the gateway does not know it."""
    if tokenizer_json is None:
        raise ModelNotFound("model: the gateway has no tokenizer of this model (TRIDENT_GATEWAY_TOKENIZER)")
    return ModelTokenizer(tokenizer_json)


class TokenizationEndpoint(OpenAIEndpoint):
    """Serve one of BODIES, as an ASGI application."""

    def __init__(self, service: Service, schema: type[TokenizeRequest] | type[DetokenizeRequest]) -> None:
        self._service, self._schema = service, schema
        self.operation = "tokenize" if schema is TokenizeRequest else "detokenize"
        self._threads = ThreadPoolExecutor(_AT_ONCE, "tokenization")

    async def _handle(
        self, response: ResponseStream, request: Request, tenant: Tenant, data: bytes, request_id: str
    ) -> None:
        openai_http.check_request_id(request_id)
        body = schemas.validated(self._schema, data)
        # The ensemble's name stands for the only model, or for the first of a table.
        model = self._service.model_of(body.model or self._service.settings.triton_model, tenant)

        def answer() -> dict[str, Any]:
            tokenizer = model_tokenizer(model.rules.tokenizer)
            return tokenizer.tokenize(body) if isinstance(body, TokenizeRequest) else tokenizer.detokenize(body)

        fields = await asyncio.get_running_loop().run_in_executor(self._threads, answer)
        headers = openai_http.response_headers(request_id, {})
        await response.respond(200, [*headers, openai_http.JSON], orjson.dumps(fields))
