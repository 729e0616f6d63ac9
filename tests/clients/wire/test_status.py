"""What a server says of itself, read by hand."""

from __future__ import annotations

import pytest
from tritonclient.grpc import service_pb2

from clients.wire import status
from contract.errors import EngineFailed


def test_models_and_flags_are_read_as_the_protobufs_wrote_them() -> None:
    index = service_pb2.RepositoryIndexResponse()
    index.models.add(name="ensemble", version="1", state="READY")
    index.models.add(name="engine", state="UNAVAILABLE", reason="unloaded")
    assert status.read_models(index.SerializeToString()) == [
        status.Model("ensemble", "1", "READY"),
        status.Model("engine", "", "UNAVAILABLE", "unloaded"),
    ]
    assert status.read_flag(service_pb2.ModelReadyResponse(ready=True).SerializeToString())
    assert not status.read_flag(b"")


def test_a_model_that_only_other_engines_have_is_left_out_unless_it_is_ready() -> None:
    def states(*ready: str) -> dict[str, str]:
        models = status.from_readiness({name: name in ready for name in status.KNOWN_MODELS})
        return {model.name: model.state for model in models}

    rest = ("ensemble", "tokenizer", "detokenizer", "client_watch")
    assert states("engine", *rest) == dict.fromkeys(("engine", *rest), "READY")
    assert states(*rest) == dict.fromkeys(rest, "READY") | {"engine": "UNAVAILABLE"}
    assert states("encoder") == {"encoder": "READY"}


@pytest.mark.parametrize(
    "answer", [b"\xff", b"\x0a\xff\xff", b"\x08", b"\x0a\x02\x08\x01", b"\x0a\x03\x0a\x01\xff", b"\x08\x01"]
)
def test_an_answer_that_is_none_is_the_servers_failure(answer: bytes) -> None:
    with pytest.raises(EngineFailed, match="the server sent an unreadable response"):
        status.read_models(answer)
        status.read_flag(answer + b"\xff")
