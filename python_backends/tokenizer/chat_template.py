"""A model's chat template, rendered as Hugging Face does: Jinja in a sandbox, because checkpoints bring their own."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from contract.errors import InvalidArgument, NotFound

_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ROLES_HINT = 'a JSON list such as [{"role": "user", "content": "Hello"}]'


class ChatTemplate:
    """``tokenizer_dir`` holds chat_template.jinja, or tokenizer_config.json with ``chat_template``."""

    def __init__(self, tokenizer_dir: Path) -> None:
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
        """The prompt for a chat, oldest message first, ending where the assistant is to speak."""
        if self._template is None:
            raise NotFound("messages: this model has no chat template; send text_input instead")
        messages = parse_messages(messages_json)
        try:
            text = self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as exc:
            raise InvalidArgument("messages", f"the model's chat template refuses them: {exc}") from exc
        _check_characters(text)
        return text


def parse_messages(messages_json: str) -> list[dict]:
    """Raises InvalidArgument naming the message and what it must hold."""
    try:
        messages = json.loads(messages_json)
    except (ValueError, RecursionError) as exc:
        raise InvalidArgument("messages", f"is not JSON ({exc}); send {_ROLES_HINT}") from exc
    if not isinstance(messages, list) or not messages:
        raise InvalidArgument("messages", f"must be {_ROLES_HINT}")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidArgument("messages", f'entry {index} has no "role"; send {_ROLES_HINT}')
        if not isinstance(message.get("content"), str):
            raise InvalidArgument("messages", f'entry {index} has no text in "content"; send {_ROLES_HINT}')
    return messages


def _token_text(token: str | dict | None) -> str:
    return token.get("content", "") if isinstance(token, dict) else token or ""


def _check_characters(text: str) -> None:
    """JSON can spell, as \\u0000 and \\ud800, what UTF-8 text may not hold."""
    if "\0" in text:
        raise InvalidArgument("messages", "hold a NUL character (\\u0000); remove it")
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        half = f"\\u{ord(text[exc.start]):x}"
        raise InvalidArgument("messages", f"hold half a character ({half}); send both halves") from exc


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks, for training, what the assistant is to learn; here it is its content."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
