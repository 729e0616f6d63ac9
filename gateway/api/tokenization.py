"""Serve /tokenize, /detokenize and /tokenizer_info in vLLM's forms: the models' tokenizers, without an engine."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from pydantic import ConfigDict, Field, StrictBool, StrictStr
from starlette.requests import Request

from contract.chat import check_tool_turns
from contract.errors import InvalidArgument, ModelNotFound, PromptTooLong
from gateway.api import openai_http, schemas
from gateway.api.error_responses import JSON
from gateway.api.openai_http import OpenAIEndpoint
from gateway.api.response_stream import ResponseStream
from gateway.api.schemas import EntryLimit, Message, TokenId, Tools, plain_tools
from gateway.api.strict_model import LevelLimit, StrictModel
from gateway.config.tenant import Tenant
from gateway.prompts.chat_tokens import ChatTokens, chat_tokens
from gateway.service import Service

MAX_BYTES = 1024 * 1024  # of a text, or of a chat as JSON
MAX_IDS = 256 * 1024
_AT_ONCE = 2  # texts and ids in work; more wait

_OF_CHATS = ("messages", "tools", "chat_template_kwargs")  # left out with a prompt
_PROPERTIES = {"prompt": {"type": "string"}, **dict.fromkeys(_OF_CHATS, {"type": "null"})}
_ONE_PROMPT: list[Any] = [
    {"required": ["prompt"], "properties": _PROPERTIES},
    {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}}},
]


class TokenizeRequest(StrictModel):
    """The body of POST /tokenize; exactly one of prompt, a text, and messages is set."""

    model_config = ConfigDict(json_schema_extra={"anyOf": _ONE_PROMPT})
    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True), EntryLimit] | None = None
    tools: Tools | None = None
    chat_template_kwargs: Annotated[dict[str, Any], LevelLimit, EntryLimit] | None = None
    add_special_tokens: StrictBool | None = None  # by default for a text only: a chat template writes its own
    add_generation_prompt: StrictBool = True
    continue_final_message: Literal[False] = False
    return_token_strs: StrictBool = False  # the tokens as the vocabulary writes them, too

    def answer(self, chat: ChatTokens) -> dict[str, Any]:
        """Return the response. Raises: InvalidArgument, or NotFound for a chat without a template."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidArgument("prompt", "must be sent if messages is not, and left out if it is")
        for name in _OF_CHATS:
            if self.messages is None and getattr(self, name):
                raise InvalidArgument(name, "must be left out without messages")
        text, special = self.prompt, self.add_special_tokens is not False
        if text is None:
            text, special = self._rendered(chat), self.add_special_tokens is True
        if len(text.encode()) > MAX_BYTES:
            name = "prompt" if self.messages is None else "messages"
            raise PromptTooLong(name, f"must have at most {MAX_BYTES} bytes, got {len(text.encode())}")
        ids = chat.ids(text, special)
        strings = [chat.library.id_to_token(token) for token in ids] if self.return_token_strs else None
        return {"count": len(ids), "max_model_len": chat.max_model_len, "tokens": ids, "token_strs": strings}

    def _rendered(self, chat: ChatTokens) -> str:
        messages = [message.plain(f"messages.{index}") for index, message in enumerate(self.messages or ())]
        check_tool_turns(tuple(messages))
        tools = orjson.dumps(plain_tools(self.tools)).decode() if self.tools else None
        variables = orjson.dumps(self.chat_template_kwargs).decode() if self.chat_template_kwargs else None
        data = orjson.dumps(messages)
        if len(data) > MAX_BYTES:
            raise PromptTooLong("messages", f"must have at most {MAX_BYTES} bytes, got {len(data)}")
        return chat.template.render(data.decode(), tools, variables, self.add_generation_prompt)


class DetokenizeRequest(StrictModel):
    """The body of POST /detokenize. tokens: ids; special tokens become text as well."""

    model: StrictStr | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]

    def answer(self, chat: ChatTokens) -> dict[str, Any]:
        """Return the response. Raises: InvalidArgument."""
        if len(self.tokens) > MAX_IDS:
            raise PromptTooLong("tokens", f"must hold at most {MAX_IDS} ids, got {len(self.tokens)}")
        size = chat.library.get_vocab_size(with_added_tokens=True)
        wrong = next((token for token in self.tokens if token >= size), None)
        if wrong is not None:
            raise InvalidArgument("tokens", f"must hold ids from 0 to {size - 1}, got {wrong}")
        return {"prompt": chat.library.decode_batch([self.tokens], skip_special_tokens=False)[0]}


BODIES: dict[str, type[TokenizeRequest] | type[DetokenizeRequest]] = {
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def _known(tokenizer_json: Path | None) -> Path:
    if tokenizer_json is None:
        raise ModelNotFound("model: the gateway has no tokenizer of this model (TRIDENT_GATEWAY_TOKENIZER)")
    return tokenizer_json


def info(tokenizer_json: Path | None) -> dict[str, Any]:
    """Return the response of /tokenizer_info. Raises: ModelNotFound if the gateway knows no tokenizer of the model."""
    path = _known(tokenizer_json)
    chat, config_path = chat_tokens(path), path.with_name("tokenizer_config.json")
    config = orjson.loads(config_path.read_bytes()) if config_path.is_file() else {}
    tokens = {name: text for name, text in chat.template.tokens.items() if text}
    about = {"tokenizer_class": config.get("tokenizer_class"), "chat_template": chat.template.source}
    return {**about, **tokens, "max_model_len": chat.max_model_len}


class TokenizationEndpoint(OpenAIEndpoint):
    """Serve one of BODIES, as an ASGI application."""

    def __init__(self, service: Service, schema: type[TokenizeRequest] | type[DetokenizeRequest]) -> None:
        self._service, self._schema = service, schema
        self.operation = "tokenize" if schema is TokenizeRequest else "detokenize"
        self._threads = ThreadPoolExecutor(_AT_ONCE, "tokenization")

    async def _handle(
        self, response: ResponseStream, request: Request, tenant: Tenant, data: bytes, request_id: str
    ) -> None:
        body = schemas.validated(self._schema, data)
        # The ensemble's name stands for the only model, or for the first of a table.
        model = self._service.model_of(body.model or self._service.settings.triton_model, tenant)

        def answer() -> dict[str, Any]:
            found: dict[str, Any] = body.answer(chat_tokens(_known(model.rules.tokenizer)))
            return found

        fields = await asyncio.get_running_loop().run_in_executor(self._threads, answer)
        headers = openai_http.response_headers(request_id, {})
        await response.respond(200, [*headers, JSON], orjson.dumps(fields))
