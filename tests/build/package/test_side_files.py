"""What serving reads beside the weights is opened at build time, and refused in one sentence."""

import json

import pytest
import tokenizers

from build.base.checkpoint import CheckpointError
from build.package import side_files
from tests.fakes import checkpoints


@pytest.fixture
def folder(tmp_path):
    checkpoints.write(tmp_path, checkpoints.CONFIGS["llama_gqa"])
    return tmp_path


def refusal(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        side_files.check(folder, lambda line: None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def warnings(folder) -> list[str]:
    said: list[str] = []
    side_files.check(folder, said.append)
    return said


def configure(folder, **fields: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


def test_a_sound_tokenizer_passes_with_or_without_a_template(folder):
    assert warnings(folder) == []
    configure(folder, chat_template="{{ messages[0].content }}", eos_token={"content": "<|end|>"}, bos_token=None)
    assert warnings(folder) == []
    (folder / "tokenizer_config.json").unlink()
    assert warnings(folder) == []


def test_the_first_id_of_chats_is_no_padding(folder):
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64, direction="left")
    tokenizer.save(str(folder / "tokenizer.json"))
    assert side_files.first_token_id(folder, None) == checkpoints.BOS


@pytest.mark.parametrize("in_a_file", [True, False])
def test_a_template_that_does_not_compile_names_the_file_and_the_line(folder, in_a_file):
    source = "{{ bos_token }}\n{% for m in %}"
    if in_a_file:
        (folder / "chat_template.jinja").write_text(source)
    else:
        configure(folder, chat_template=source)
    name = "chat_template.jinja" if in_a_file else "tokenizer_config.json"
    assert f"{name}: chat_template does not compile: line 2: " in refusal(folder)


def test_a_template_that_refuses_a_single_user_message_is_a_warning(folder):
    configure(folder, chat_template="{{ raise_exception('send a system message first') }}")
    (said,) = warnings(folder)
    assert "warning: the chat template refuses a single user message" in said and "system message first" in said


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"chat_template": 3}, "chat_template must be a string, or a list of them, got 3"),
        ({"chat_template": [{"name": "default"}]}, "chat_template must hold an object"),
        ({"chat_template": ["x"]}, "chat_template must hold an object"),
        ({"eos_token": 5}, "eos_token must be a string"),
        ({"bos_token": {"content": []}}, "bos_token must be a string"),
    ],
)
def test_fields_of_the_wrong_type_are_named(folder, fields, says):
    configure(folder, **fields)
    assert says in refusal(folder) and "tokenizer_config.json" in refusal(folder)


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff"])
def test_a_tokenizer_config_that_is_no_object_is_named(folder, content):
    (folder / "tokenizer_config.json").write_bytes(content)
    assert "tokenizer_config.json is not" in refusal(folder)


@pytest.mark.parametrize("content", ['{"model": {"type": "BPE", "vocab": {"a": 0}}}', "", '{"model": {"vocab": 1}}'])
def test_a_tokenizer_that_cannot_be_loaded_is_named(folder, content):
    (folder / "tokenizer.json").write_text(content)
    assert "tokenizer.json is not a tokenizer that the tokenizers library reads" in refusal(folder)


def test_a_template_file_that_is_not_utf8_is_named(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe{{")
    assert "chat_template.jinja: chat_template cannot be read" in refusal(folder)


def test_a_tokenizer_that_loads_and_cannot_encode_is_refused(folder):
    path = folder / "tokenizer.json"
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": model}))
    assert "tokenizer.json is not a tokenizer that the tokenizers library reads: WordLevel error" in refusal(folder)


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        ({"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}, "CTC"),
        (None, "no decoder"),
    ],
)
def test_a_decoder_that_the_detokenizer_does_not_support_is_refused_by_name(folder, decoder, named):
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"decoder": decoder}))
    message = refusal(folder)
    assert (
        f"decoder: must be made of ByteFallback, ByteLevel, Fuse, Metaspace, Replace, Sequence, Strip, got {named}"
        in message
    )
