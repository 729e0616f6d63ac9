"""How a model's family writes tool calls and reasoning, found in its chat template."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import jinja2
import orjson

from gateway.admission.prompt_tokens import load_tokenizer
from gateway.config.policy import ModelRules
from gateway.config.settings import Settings
from python_backends.tokenizer.chat_template import sandbox

AUTO, NONE = "auto", "none"
HERMES, LLAMA3, MISTRAL = "hermes", "llama3", "mistral"
TAGGED, OPEN = "tagged", "open"
THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True)
class Family:
    """The form of tool calls. Every call is a JSON object with a ``name`` and arguments."""

    begin: str  # what precedes a call, or a list of calls
    end: str  # what follows it; "" for nothing
    arguments: str  # the key of the arguments
    between: str  # characters that may stand around and between the objects
    bare: bool = False  # an output that begins with a call's object is one without ``begin``


FAMILIES = {
    HERMES: Family("<tool_call>", "</tool_call>", "arguments", " \t\r\n"),
    LLAMA3: Family("<|python_tag|>", "", "parameters", " \t\r\n;", bare=True),
    MISTRAL: Family("[TOOL_CALLS]", "", "arguments", " \t\r\n[,]"),
}


_LLAMA3_CALL = ('{"name": "', '"parameters": ')  # in templates that write calls without a marker
_NO_JSON = ("<function=", "<arg_key>", "[ARGS]")  # in templates whose calls are no JSON objects between the markers
_PROBE = [{"role": "user", "content": "?"}]


@dataclass(frozen=True)
class ChatFormat:
    """How a model's chat template has it write."""

    tools: str = HERMES  # key of FAMILIES; "none" if the template has another form
    reasoning: str = NONE  # "tagged" if the model writes ``<think>``, "open" if the prompt ends with it, else "none"
    special: bool = False  # whether the marker before a call is a special token, which texts leave out

    @property
    def family(self) -> Family | None:
        return FAMILIES.get(self.tools)


def configured(settings: Settings, model: ModelRules) -> ChatFormat:
    """Return the format that a model's rules name, or the settings, or the chat template beside its tokenizer shows."""
    tools = settings.tool_format if model.tool_format == AUTO else model.tool_format
    reasoning = settings.reasoning_format if model.reasoning_format == AUTO else model.reasoning_format
    return _configured(model.tokenizer, tools, reasoning)


@lru_cache(maxsize=64)
def _configured(tokenizer: Path | None, tools: str, reasoning: str) -> ChatFormat:
    found = ChatFormat() if tokenizer is None else _of_folder(tokenizer.parent)
    tools = found.tools if tools == AUTO else tools
    reasoning = found.reasoning if reasoning == AUTO else reasoning
    special = False
    if tokenizer is not None and tools in FAMILIES:
        added = load_tokenizer(tokenizer).get_added_tokens_decoder().values()
        special = any(token.special and token.content == FAMILIES[tools].begin for token in added)
    return ChatFormat(tools, reasoning, special)


def of_template(source: str) -> ChatFormat:
    """Return the format that a chat template's text shows."""
    families = [name for name, family in FAMILIES.items() if family.begin in source]
    if not families and all(part in source for part in _LLAMA3_CALL):
        families = [LLAMA3]
    if re.search(r"\btools\b", source) is None:
        tools = HERMES  # the tokenizer model describes the tools in this form
    else:
        tools = families[0] if families and not any(part in source for part in _NO_JSON) else NONE
    if THINK not in source and END_THINK not in source:
        return ChatFormat(tools)
    try:
        prompt = sandbox().from_string(source).render(messages=_PROBE, add_generation_prompt=True)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError):  # it needs a chat of another form
        prompt = ""
    return ChatFormat(tools, OPEN if prompt.rstrip().endswith(THINK) else TAGGED)


def _of_folder(folder: Path) -> ChatFormat:
    template, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    source: object = ""
    if template.exists():
        source = template.read_text("utf-8")
    elif config.exists():
        source = orjson.loads(config.read_bytes()).get("chat_template") or ""
    if isinstance(source, list):  # several named templates
        source = "\n".join(entry["template"] for entry in source if entry["name"] in ("default", "tool_use"))
    return of_template(str(source))
