"""A model's chat template, rendered as Hugging Face does: in a Jinja sandbox, because the template is part of the
checkpoint and so not trusted."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from contract.errors import InvalidArgument, NotFound

_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ROLES_HINT = 'a JSON list such as [{"role": "user", "content": "Hello"}]'


class ChatTemplate:
    """Renders chats to prompts."""

    def __init__(self, tokenizer_dir: Path) -> None:
        """tokenizer_dir: holds chat_template.jinja, or tokenizer_config.json with ``chat_template``."""
        config_path = tokenizer_dir / "tokenizer_config.json"
        config = json.loads(config_path.read_text("utf-8")) if config_path.exists() else {}
        source = config.get("chat_template")
        if isinstance(source, list):  # several named templates
            source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
        jinja_path = tokenizer_dir / "chat_template.jinja"
        if jinja_path.exists():
            source = jinja_path.read_text("utf-8")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self._template = environment.from_string(source) if source else None
        self._tokens = {name: _token_text(config.get(name)) for name in _TOKENS}

    def render(self, messages_json: str) -> str:
        """Return the prompt of a chat, ending where the assistant's message begins.

        Raises:
            NotFound: the model has no chat template.
            InvalidArgument: the messages are not a chat, or the template refuses them.
        """
        if self._template is None:
            raise NotFound("messages: this model has no chat template; send text_input instead")
        messages = parse_messages(messages_json)
        try:
            text = self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as exc:
            raise InvalidArgument("messages", f"must suit the model's chat template, got {exc}") from exc
        _check_characters(text)
        return text


def parse_messages(messages_json: str) -> list[dict[str, Any]]:
    """Parse the input ``messages``.

    Raises:
        InvalidArgument: it is not a chat; names the message and what it must hold.
    """
    try:
        messages = json.loads(messages_json)
    except (ValueError, RecursionError) as exc:
        raise InvalidArgument("messages", f"must be {_ROLES_HINT}, got no JSON: {exc}") from exc
    if not isinstance(messages, list) or not messages:
        raise InvalidArgument("messages", f"must be {_ROLES_HINT}")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidArgument("messages", f'entry {index} must have a "role", as in {_ROLES_HINT}')
        if not isinstance(message.get("content"), str):
            raise InvalidArgument("messages", f'entry {index} must have text in "content", as in {_ROLES_HINT}')
    return messages


def _token_text(token: str | dict[str, Any] | None) -> str:
    return token.get("content", "") if isinstance(token, dict) else token or ""


def _check_characters(text: str) -> None:
    """Refuse what JSON can write, as \\u0000 and \\ud800, and UTF-8 text cannot."""
    if "\0" in text:
        raise InvalidArgument("messages", "must hold no NUL character (\\u0000), got one")
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        half = f"\\u{ord(text[exc.start]):x}"
        raise InvalidArgument("messages", f"must be encodable as UTF-8, got a lone surrogate ({half})") from exc


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text for training; it is rendered as its content."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
