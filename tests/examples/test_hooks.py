"""The example hooks: what they remove, however a text is divided, and whom they let in."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import InvalidArgument, Unauthenticated
from contract.generation import GenerationRequest
from contract.redaction import redact
from examples.hooks.own_authentication import SignedCaller, sign
from examples.hooks.personal_data import PersonalData, StreamedText, last_cut
from gateway.hooks.call import Call

CALL = Call("r", "t", "http", "chat", {})
PIECES = (
    "a.b@c.example|call +49 30 1234567|(030) 123-4567|030 123-4567|4111 1111 1111 1111|4111111111111111|"
    "DE89 3704 0044 0532 0130 00| GB29 NWBK|192.168.1.17|fe80:0:0:1:2:3:4:5|https://user,x:pw@host/x|"
    "Bearer abcdefghijklmnopqrst|sk-abcdefghijklmnop1234|-----BEGIN RSA PRIVATE KEY-----|"
    "-----END RSA PRIVATE KEY-----|123-45-6789|张三|，| |  |\n|\r\n|\t|\u00a0|, |. |the |THE |und 12 "
    "|x|1|@|-|:|/|.|(|)|+|=|é"
)
TEXTS = st.lists(st.sampled_from(PIECES.split("|")), max_size=12).map("".join)


@given(TEXTS, st.lists(st.integers(1, 12), min_size=1))
def test_however_a_text_is_divided_the_same_is_removed(text: str, sizes: list[int]):
    stream, found, at, turn = StreamedText(redact, last_cut), "", 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        found, at, turn = found + stream.feed(text[at : at + size]), at + size, turn + 1
    assert found + stream.finish() == redact(text)


def test_plain_text_is_kept_back_for_a_word_at_most():
    stream = StreamedText(redact, last_cut)
    shown = [stream.feed(word) for word in ("The", " cat", " sat", " on", " the", " mat", ",", " it")]
    assert shown == ["", "The", " cat", " sat", " on", " the", " mat,", ""]


def test_prompts_tool_calls_and_their_results_lose_personal_data():
    hook = PersonalData(keep=["IP"])
    mail, arguments = "Mail a.b@c.example from 10.0.0.1", json.dumps({"to": "a.b@c.example", "card": 4111111111111111})
    calls = [{"id": "c", "type": "function", "function": {"name": "send", "arguments": arguments}}]
    messages = (
        {"role": "user", "content": [{"type": "text", "text": mail}]},
        {"role": "assistant", "tool_calls": calls},
    )
    found = hook.request(GenerationRequest(messages=messages), CALL).messages
    assert found is not None and found[0]["content"][0]["text"] == "Mail [EMAIL] from 10.0.0.1"
    [call] = found[1]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"to": "[EMAIL]", "card": "[CARD]"} and call["id"] == "c"
    assert hook.request(GenerationRequest(text_input=mail), CALL).text_input == "Mail [EMAIL] from 10.0.0.1"
    with pytest.raises(InvalidArgument, match="prompt: must be text"):
        hook.request(GenerationRequest(input_ids=(1, 2)), CALL)
    with pytest.raises(ValueError, match="keep must hold names of PRIVATE_KEY, SECRET"):
        PersonalData(keep=["MAIL"])


def test_only_fields_of_the_protocol_are_no_text():
    mail = "a.b@c.example"
    odd = {"name": mail, "id": mail, "type": [mail], "role": {"name": mail}, "function": {"name": mail}}
    clean = json.loads(json.dumps(odd).replace(mail, "[EMAIL]"))
    function = {"name": mail, "arguments": odd}
    message = {
        "role": "assistant",
        "name": mail,
        "content": [{"type": mail, "text": mail, "name": mail}],
        "tool_calls": [{"id": mail, "type": "function", "name": mail, "function": function}],
        "more": odd,
    }
    for arguments in (odd, json.dumps(odd)):
        function["arguments"] = arguments
        [found] = PersonalData().request(GenerationRequest(messages=(message,)), CALL).messages
        assert (found["role"], found["name"], found["more"]) == ("assistant", mail, clean)
        assert found["content"] == [{"type": mail, "text": "[EMAIL]", "name": "[EMAIL]"}]
        [call] = found["tool_calls"]
        assert (call["id"], call["name"], call["function"]["name"]) == (mail, "[EMAIL]", mail)
        told = call["function"]["arguments"]
        assert (json.loads(told) if isinstance(told, str) else told) == clean
    output = PersonalData().output("arguments", CALL)
    assert output.feed(json.dumps(odd)) == "" and json.loads(output.finish()) == clean
    result = {"role": "tool", "tool_call_id": mail, "content": mail}
    [found] = PersonalData().request(GenerationRequest(messages=(result,)), CALL).messages
    assert found == {"role": "tool", "tool_call_id": mail, "content": "[EMAIL]"}


def test_arguments_stay_json_and_cut_ones_are_redacted_as_text():
    whole = PersonalData().output("arguments", CALL)
    assert whole.feed('{"to": "a\\u0040b') == whole.feed('.example"}') == "" and whole.finish() == '{"to": "[EMAIL]"}'
    cut = PersonalData().output("arguments", CALL)
    assert cut.feed('{"to": "a@b.example"') == "" and cut.finish() == '{"to": "[EMAIL]"'


def test_only_a_fresh_signature_names_a_caller():
    hook, secret = SignedCaller("a secret of the proxy"), b"a secret of the proxy"
    text = f"acme/research/alice;{int(time.time())}"
    assert hook.authenticate({"x-caller": f"{text};{sign(secret, text)}"}) == "acme/research/alice"
    assert hook.authenticate({}) is None
    old = "acme/research/alice;1700000000"
    for signed in (f"{text};{sign(b'another', text)}", f"{old};{sign(secret, old)}", "acme/research/alice", ""):
        with pytest.raises(Unauthenticated):
            hook.authenticate({"x-caller": signed})
    with pytest.raises(ValueError, match="at least 16 characters"):
        SignedCaller("short")
