"""A model's chat template, rendered as Hugging Face does: in a Jinja sandbox, because the template is part of the
checkpoint and so not trusted."""

from __future__ import annotations

import datetime
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from contract.errors import InvalidArgument, NotFound
from python_backends.tokenizer.chat import Message, parse_messages, parse_tools, parse_variables, with_tools

_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PROBE = [{"role": "user", "content": "?"}]
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "?", "parameters": {"type": "object", "properties": {}}},
}
# What a template raises about a chat that does not suit it, beside its own errors.
_REFUSALS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
_FIXED = {"messages", "tools", "documents", "add_generation_prompt", *_TOKENS}


class ChatTemplate:
    """Renders chats to prompts.

    source: the Jinja text, None without a template.
    tokens: the tokenizer's named tokens, such as ``bos_token``; empty where there is none.
    """

    def __init__(self, tokenizer_dir: Path) -> None:
        """tokenizer_dir: holds chat_template.jinja, or tokenizer_config.json with ``chat_template``."""
        config_path = tokenizer_dir / "tokenizer_config.json"
        config = json.loads(config_path.read_text("utf-8")) if config_path.exists() else {}
        source, tool_source = config.get("chat_template"), None
        if isinstance(source, list):  # several named templates
            named = {entry["name"]: entry["template"] for entry in source}
            source, tool_source = named.get("default"), named.get("tool_use")
        jinja_path = tokenizer_dir / "chat_template.jinja"
        if jinja_path.exists():
            source, tool_source = jinja_path.read_text("utf-8"), None
        environment = sandbox()
        self.source: str | None = source
        self._template = environment.from_string(source) if source else None
        self._tool_template = environment.from_string(tool_source) if tool_source else self._template
        # The names that the templates use, those of their own variables and of functions included.
        trees = [environment.parse(text) for text in (source, tool_source) if text]
        self._names = {node.name for tree in trees for node in tree.find_all(jinja2.nodes.Name)}
        tokens = {name: config.get(name) or "" for name in _TOKENS}
        self.tokens = {name: one.get("content", "") if isinstance(one, dict) else one for name, one in tokens.items()}

    @cached_property
    def knows_tools(self) -> bool:
        """Whether the template shows tools to the model."""
        try:
            return self._rendered(_PROBE, [_PROBE_TOOL], {}, True) != self._rendered(_PROBE, None, {}, True)
        except InvalidArgument:  # it needs a chat of another form
            return "tools" in self._names

    def render(
        self,
        messages_json: str,
        tools_json: str | None = None,
        variables_json: str | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the prompt of a chat.

        tools_json, variables_json: the inputs ``tools`` and ``chat_template_kwargs``.
        add_generation_prompt: end where the assistant's message begins.
        Raises NotFound: the model has no chat template.
        Raises InvalidArgument: an input is malformed, the template refuses the messages, or it has no such variable.
        """
        if self._template is None:
            raise NotFound("messages: this model has no chat template; send text_input instead")
        messages = parse_messages(messages_json)
        tools = None if tools_json is None else parse_tools(tools_json)
        variables = {} if variables_json is None else parse_variables(variables_json)
        for name, value in variables.items():
            # A variable that is not there cannot be switched on; it is off already.
            if name in _FIXED or (name not in self._names and value not in (None, False)):
                problem = "must have variables of the model's chat template only"
                raise InvalidArgument("chat_template_kwargs", f"{problem}, got {name!r:.100}")
        if not self.knows_tools and (tools or any(one["role"] == "tool" for one in messages)):
            messages, tools = with_tools(messages, tools or ()), None
        text = self._rendered(messages, tools, variables, add_generation_prompt)
        _check_characters(text)
        return text

    def _rendered(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, variables: dict[str, Any], generates: bool
    ) -> str:
        template = self._tool_template if tools else self._template
        assert template is not None
        try:
            chat = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": generates}
            return template.render(variables | chat | self.tokens)
        except (jinja2.TemplateError, *_REFUSALS) as exc:
            raise InvalidArgument("messages", f"must suit the model's chat template, got {exc}") from exc


def sandbox(undefined: type[jinja2.Undefined] = jinja2.Undefined) -> ImmutableSandboxedEnvironment:
    """Return a Jinja environment as chat templates expect it. undefined: what a name without a value is."""
    blocks: dict[str, Any] = {
        "trim_blocks": True,
        "lstrip_blocks": True,
        "extensions": ["jinja2.ext.loopcontrols", _GenerationTag],
    }
    environment = ImmutableSandboxedEnvironment(**blocks, undefined=undefined)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


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
