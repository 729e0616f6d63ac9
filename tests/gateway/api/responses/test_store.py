"""Responses are kept, within bounds, for their tenant alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from contract.errors import InvalidArgument, NotFound
from gateway.api.responses.store import ResponseStore
from gateway.config.settings import Settings

NOW_S = [1000.0]


def opened(path: Path | None = None, **limits: Any) -> ResponseStore:
    NOW_S[0] = 1000.0
    return ResponseStore(Settings(response_db=path, **limits), lambda: NOW_S[0])


def put(store: ResponseStore, name: str, previous: str | None = None, tenant: str = "a", text: str = "") -> None:
    response = {"id": name, "previous_response_id": previous, "output": [{"id": f"{name}-out", "text": text}]}
    store.put(tenant, [{"id": f"{name}-in"}], response)


def ids(items: list[dict[str, Any]]) -> list[str]:
    return [item["id"] for item in items]


def reference(item: str) -> dict[str, Any]:
    return {"type": "item_reference", "id": item}


def test_a_conversation_is_all_that_a_response_continues_and_survives_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path / "folder" / "responses")
    put(store, "r1")
    put(store, "r2", "r1")
    put(store, "r2", "r1")  # of a retry
    put(store, "other")
    store.close()
    store = opened(tmp_path / "folder" / "responses")
    assert orjson.loads(store.get("a", "r2"))["id"] == "r2"
    assert ids(store.conversation("a", "r2")) == ["r1-in", "r1-out", "r2-in", "r2-out"]
    assert ids(store.inputs("a", "r2")) == ["r1-in", "r1-out", "r2-in"]
    [own, stored] = store.resolved("a", [{"type": "message", "id": "r1-in"}, reference("r1-out")])
    assert own["type"] == "message" and stored == {"id": "r1-out", "text": ""}
    store.close()


def test_another_tenants_response_is_one_that_does_not_exist() -> None:
    store = opened()
    put(store, "r1")
    messages = []
    for call in (store.get, store.delete, store.inputs):
        with pytest.raises(NotFound) as caught:
            call("b", "r1")
        with pytest.raises(NotFound) as unknown:
            call("b", "r0")
        messages.append((str(caught.value), str(unknown.value)))
    assert set(messages) == {("no such response: 'r1'", "no such response: 'r0'")}
    with pytest.raises(InvalidArgument, match="input.0.id: must be of a stored item"):
        store.resolved("b", [reference("r1-in")])
    with pytest.raises(InvalidArgument, match="must be the id of a stored response, got 'r1'"):
        store.conversation("b", "r1")
    put(store, "r1", tenant="b")
    store.delete("b", "r1")
    assert store.get("a", "r1")
    store.close()


def test_a_deleted_response_is_gone_with_its_items_and_ends_what_continues_it() -> None:
    store = opened()
    put(store, "r1")
    put(store, "r2", "r1")
    store.delete("a", "r1")
    with pytest.raises(InvalidArgument, match="input.0.id: must be of a stored item"):
        store.resolved("a", [reference("r1-in")])
    with pytest.raises(NotFound):
        store.get("a", "r1")
    assert store.get("a", "r2") and ids(store.inputs("a", "r2")) == ["r2-in"]
    put(store, "r3", "r1")  # r1 was deleted while r3 was generated
    for name in ("r2", "r3"):
        with pytest.raises(InvalidArgument, match=f"a response before '{name}' is gone"):
            store.conversation("a", name)
    store.close()


def test_a_response_expires_after_the_last_that_continues_it() -> None:
    store = opened(response_keep_s=100.0)
    put(store, "r1")
    put(store, "r0")
    NOW_S[0] += 60
    put(store, "r2", "r1")
    NOW_S[0] += 60
    assert ids(store.conversation("a", "r2")) == ["r1-in", "r1-out", "r2-in", "r2-out"]
    with pytest.raises(NotFound):
        store.get("a", "r0")
    NOW_S[0] += 60
    put(store, "r3")
    assert store._db.execute("SELECT count(*) FROM items").fetchone() == (2,)
    store.close()


def test_those_used_longest_ago_go_first() -> None:
    store = opened(response_max=3)
    for name in ("r1", "r2", "r3"):
        put(store, name)
        NOW_S[0] += 1
    put(store, "r4", "r1")
    assert ids(store.conversation("a", "r4")) == ["r1-in", "r1-out", "r4-in", "r4-out"]
    with pytest.raises(NotFound):
        store.get("a", "r2")
    put(store, "theirs", tenant="b")
    assert store.get("a", "r3")
    store.close()


def test_bytes_are_bounded_and_the_newest_stays() -> None:
    store = opened(response_max_bytes=2000)
    for number in range(4):
        put(store, f"r{number}", text="x" * 400)
        NOW_S[0] += 1
    with pytest.raises(NotFound):
        store.get("a", "r1")
    assert store.get("a", "r2")
    put(store, "large", text="x" * 4000)
    assert store.get("a", "large") and store._db.execute("SELECT count(*) FROM responses").fetchone() == (1,)
    store.close()


def test_a_conversation_that_is_too_large_is_refused() -> None:
    store = opened(max_body_bytes=1024)
    put(store, "r1", text="x" * 300)
    assert store.conversation("a", "r1")
    put(store, "r2", "r1", text="x" * 300)
    with pytest.raises(InvalidArgument, match="must be of a conversation of at most 1024 bytes"):
        store.conversation("a", "r2")
    with pytest.raises(InvalidArgument, match="input.3.id: must be of a stored item, of at most 1024 bytes together"):
        store.resolved("a", [reference("r1-out")] * 9)
    store.close()
