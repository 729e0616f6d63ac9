"""The tokenizer and the chat template of a checkpoint, opened as serving will open them before anything long starts."""

import json
from pathlib import Path

from build.base.json_fields import BadField, CheckpointError, Fields, line_of, read_object, shown
from build.base.program import Notify
from contract.errors import InvalidArgument, NotFound

SIMPLEST_CHAT = json.dumps([{"role": "user", "content": "Hello"}])
SAMPLE = "def read_json(path):\n    return 1  # é 你好"
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def check(folder: Path, notify: Notify) -> None:
    """Raises CheckpointError for a tokenizer.json or chat template that serving could not load. A template that refuses
    a single user message is a warning: it may want a system message or tools, and prompts sent as text never reach
    it."""
    _load_tokenizer(folder / "tokenizer.json")
    _check_tokenizer_config(folder / "tokenizer_config.json")
    if problem := _chat_problem(folder):
        notify(f"warning: the chat template refuses a single user message: {problem}")


def first_token_id(folder: Path, bos_token_id: int | None) -> int:
    """Return the id that chats begin with, or, without a chat template, texts; 0 where both begin with any id."""
    import tokenizers

    from python_backends.tokenizer.chat_template import ChatTemplate

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    try:
        chat = ChatTemplate(folder).render(SIMPLEST_CHAT)
        return tokenizer.encode(chat, add_special_tokens=False).ids[0]
    except (InvalidArgument, NotFound, IndexError):
        return bos_token_id or 0


def _load_tokenizer(path: Path) -> None:
    import tokenizers

    from python_backends.detokenizer.decoding import Decoding

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        tokenizer.decode(tokenizer.encode(SAMPLE).ids)
    except Exception as exc:  # the library raises nothing narrower
        raise CheckpointError(f"{path} is not a tokenizer that the tokenizers library reads: {line_of(exc)}") from exc
    try:
        Decoding(tokenizer)
    except InvalidArgument as exc:
        raise CheckpointError(f"{path}: {line_of(exc)}") from exc


def _check_tokenizer_config(path: Path) -> None:
    """The fields that serving reads are of the types it expects."""
    try:
        fields = Fields(read_object(path), str(path))
    except FileNotFoundError:
        return
    except BadField as exc:
        raise CheckpointError(str(exc)) from exc
    template = fields.get("chat_template")
    if isinstance(template, list):
        for entry in template:
            texts = [entry.get("name"), entry.get("template")] if isinstance(entry, dict) else [None]
            if not all(isinstance(text, str) for text in texts):
                allowed = "an object with the strings name and template"
                raise CheckpointError(f"{path}: chat_template must hold {allowed}, got {shown(entry)}")
    elif template is not None and not isinstance(template, str):
        raise CheckpointError(f"{path}: chat_template must be a string, or a list of them, got {shown(template)}")
    for name in _TOKENS:
        token = fields.get(name)
        text = token.get("content", "") if isinstance(token, dict) else token
        if text is not None and not isinstance(text, str):
            raise CheckpointError(f"{path}: {name} must be a string, or an object with content, got {shown(token)}")


def _chat_problem(folder: Path) -> str | None:
    """Why the simplest chat cannot be rendered; None where it can, or where there is no template."""
    import jinja2

    from python_backends.tokenizer.chat_template import ChatTemplate

    jinja = folder / "chat_template.jinja"
    path = jinja if jinja.exists() else folder / "tokenizer_config.json"
    try:
        template = ChatTemplate(folder)
        template.render(SIMPLEST_CHAT)
    except jinja2.TemplateSyntaxError as exc:
        raise CheckpointError(f"{path}: chat_template does not compile: line {exc.lineno}: {line_of(exc)}") from exc
    except (OSError, ValueError, RecursionError) as exc:
        raise CheckpointError(f"{path}: chat_template cannot be read: {line_of(exc)}") from exc
    except InvalidArgument as exc:
        return line_of(exc)
    except AttributeError as exc:
        raise CheckpointError(f"{path}: chat_template fails on a single user message: {line_of(exc)}") from exc
    except NotFound:
        pass  # no template: prompts come as text
    return None
