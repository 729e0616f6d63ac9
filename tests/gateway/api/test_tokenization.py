"""Text to ids and back without an engine, as evaluation harnesses and vLLM's clients ask for it."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from contract.errors import InvalidArgument, NotFound, PromptTooLong
from gateway.api import schemas, tokenization
from gateway.api.tokenization import DetokenizeRequest, TokenizeRequest
from gateway.prompts.chat_tokens import ChatTokens
from tests.gateway.running import Running, gateway, until

DEMO = Path(__file__).resolve().parents[3] / "build" / "demo_model" / "checkpoint" / "tokenizer.json"
LIBRARY = Tokenizer.from_file(str(DEMO))
CHAT = [{"role": "user", "content": "Hé"}]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's tokenizer with a template of its own."""
    folder = tmp_path_factory.mktemp("model")
    shutil.copyfile(DEMO, folder / "tokenizer.json")
    config = {"bos_token": {"content": "<|begin|>"}, "eos_token": "<|end|>", "tokenizer_class": "X"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder / "tokenizer.json"


@pytest.fixture(scope="module")
def model(path: Path) -> ChatTokens:
    return ChatTokens(path)


def tokenize(model: ChatTokens, **body: Any) -> dict[str, Any]:
    return schemas.validated(TokenizeRequest, json.dumps(body).encode()).answer(model)


@given(st.text(max_size=200), st.booleans())
def test_ids_are_the_librarys_and_become_the_text_again(model: ChatTokens, text: str, special: bool) -> None:
    found = tokenize(model, prompt=text, add_special_tokens=special, return_token_strs=True)
    expected = LIBRARY.encode(text, add_special_tokens=special)
    assert (found["tokens"], found["token_strs"], found["count"]) == (expected.ids, expected.tokens, len(expected.ids))
    body = DetokenizeRequest(tokens=found["tokens"])
    assert body.answer(model) == {"prompt": LIBRARY.decode(expected.ids, skip_special_tokens=False)}


def test_a_chat_is_rendered_and_gets_special_tokens_only_when_asked(model: ChatTokens) -> None:
    for more, text, special in (
        ({}, "<user>Hé<bot>", False),
        ({"add_generation_prompt": False}, "<user>Hé", False),
        ({"add_special_tokens": True}, "<user>Hé<bot>", True),
    ):
        found = tokenize(model, messages=CHAT, **more)
        assert found["tokens"] == LIBRARY.encode(text, add_special_tokens=special).ids
        assert found["token_strs"] is None and found["max_model_len"] is None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": CHAT}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"messages": CHAT, "continue_final_message": True}, "continue_final_message"),
        ({"prompt": "a", "nonsense": 1}, "nonsense"),
        ({"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"prompt": "a", "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ({"messages": CHAT, "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ({"prompt": "a", "add_special_tokens": "yes"}, "add_special_tokens"),
        (
            {"messages": CHAT, "chat_template_kwargs": json.loads('{"a":' * 300 + "1" + "}" * 300)},
            "chat_template_kwargs",
        ),
    ],
)
def test_a_wrong_body_is_named_by_its_field(model: ChatTokens, body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        tokenize(model, **body)
    assert refused.value.field == field


def test_sizes_are_bounded(model: ChatTokens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenization, "MAX_BYTES", 10)
    monkeypatch.setattr(tokenization, "MAX_IDS", 3)
    for body in ({"prompt": "x" * 11}, {"messages": CHAT}):
        with pytest.raises(PromptTooLong, match="must have at most 10 bytes, got"):
            tokenize(model, **body)
    with pytest.raises(PromptTooLong, match="tokens: must hold at most 3 ids, got 4"):
        DetokenizeRequest(tokens=[1] * 4).answer(model)
    size = LIBRARY.get_vocab_size()
    with pytest.raises(InvalidArgument, match=f"tokens: must hold ids from 0 to {size - 1}, got {size}"):
        DetokenizeRequest(tokens=[1, size]).answer(model)


def test_a_tokenizer_without_a_template_says_so(tmp_path: Path) -> None:
    shutil.copyfile(DEMO, tmp_path / "tokenizer.json")
    with pytest.raises(NotFound, match="this model has no chat template"):
        tokenize(ChatTokens(tmp_path / "tokenizer.json"), messages=CHAT)


def test_the_info_has_the_special_tokens_as_text_and_the_template(path: Path) -> None:
    found = tokenization.info(path)
    assert (found["bos_token"], found["eos_token"], found["tokenizer_class"]) == ("<|begin|>", "<|end|>", "X")
    assert found["chat_template"] == TEMPLATE and "pad_token" not in found


async def test_the_endpoints_need_no_replica_and_run_beside_each_other() -> None:
    async with gateway(model="demo", tokenizer=DEMO) as running:
        answers = await asyncio.gather(*(running.post("/tokenize", {"prompt": f"word {n} " * n}) for n in range(8)))
        for n, (status, headers, body) in enumerate(answers):
            assert (status, body["tokens"]) == (200, LIBRARY.encode(f"word {n} " * n).ids) and headers["x-request-id"]
        status, _, body = await running.post("/detokenize", {"tokens": LIBRARY.encode("def f():").ids, "model": "demo"})
        assert status == 200 and "def f():" in body["prompt"]
        assert (await info(running))["eos_token"]
        for path, wrong, code in (
            ("/tokenize", {"prompt": "a", "model": "other"}, 404),
            ("/detokenize", {"tokens": [-1]}, 400),
            ("/detokenize", {"tokens": [2**31 - 1]}, 400),
            ("/tokenize", {"prompt": "a", "n": 1}, 400),
        ):
            status, _, body = await running.post(path, wrong)
            assert status == code and body["error"]["message"]
    async with gateway(model="demo") as running:
        status, _, body = await running.post("/tokenize", {"prompt": "a"})
        assert status == 404 and "no tokenizer of this model" in body["error"]["message"]
        assert (await running.get("/tokenizer_info"))[0] == 404


async def test_without_a_model_it_is_the_first_of_the_table() -> None:
    config = f'[models.first]\npools = [""]\ntokenizer = "{DEMO}"\n[models.second]\npools = [""]\n'
    async with gateway(config=config) as running:
        for path, body in (("/tokenize", {"prompt": "word"}), ("/detokenize", {"tokens": [1]})):
            status, _, answer = await running.post(path, body)
            assert status == 200, answer
        assert (await running.get("/tokenizer_info"))[0] == 200


async def info(running: Running) -> dict[str, Any]:
    status, text = await running.get("/tokenizer_info?model=demo")
    assert status == 200
    found: dict[str, Any] = json.loads(text)
    return found


async def test_two_are_in_work_at_once_also_where_clients_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, lock = 0, 0, threading.Lock()
    counted = TokenizeRequest.answer

    def slow(self: TokenizeRequest, chat: ChatTokens) -> dict[str, Any]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1
        return counted(self, chat)

    monkeypatch.setattr(TokenizeRequest, "answer", slow)
    async with gateway(model="demo", tokenizer=DEMO) as served:
        for _ in range(6):
            leaving = [asyncio.create_task(served.post("/tokenize", {"prompt": "a"})) for _ in range(2)]
            await until(lambda: running > 0)
            for task in leaving:
                task.cancel()
            await asyncio.gather(*leaving, return_exceptions=True)
        assert (await served.post("/tokenize", {"prompt": "a"}))[0] == 200
    assert 0 < most <= 2
