"""A model's chat template, rendered as Hugging Face does: Jinja in a sandbox, because checkpoints bring their own."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from contract.errors import InvalidArgument, NotFound

_ROLES_HINT = 'a JSON list such as [{"role": "user", "content": "Hello"}]'


class ChatTemplate:
    """``tokenizer_dir`` holds tokenizer_config.json with ``chat_template``, or a chat_template.jinja beside it."""

    def __init__(self, tokenizer_dir: Path) -> None:
        config_path = tokenizer_dir / "tokenizer_config.json"
        config = json.loads(config_path.read_text()) if config_path.exists() else {}
        source = config.get("chat_template")
        if isinstance(source, list):  # several named templates
            source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
        jinja_path = tokenizer_dir / "chat_template.jinja"
        if source is None and jinja_path.exists():
            source = jinja_path.read_text()
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self._template = environment.from_string(source) if source else None
        self._tokens = {
            name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        }

    def render(self, messages_json: str) -> str:
        """The prompt for a chat, oldest message first, ending where the assistant is to speak."""
        if self._template is None:
            raise NotFound("messages: this model has no chat template; send text_input instead")
        messages = parse_messages(messages_json)
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._tokens)
        except jinja2.TemplateError as exc:
            raise InvalidArgument("messages", f"the model's chat template refuses them: {exc}") from exc


def parse_messages(messages_json: str) -> list[dict]:
    """Raises InvalidArgument naming the message and what it must hold."""
    try:
        messages = json.loads(messages_json)
    except ValueError as exc:
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


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
