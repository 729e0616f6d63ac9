"""Chats that are too long for the engine, and templates, through the gateway and the real server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from server.replica import Replica
from tests.gateway.running import gateway

CONFIG = """
[pools]
demo = {{ replicas = "{url}" }}
[models.demo]
pools = ["demo"]
tokenizer = "{tokenizer}"
plain_tools = true
[models.demo.context]
policy = "{policy}"
"""
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"title": "Sum", "type": "object", "properties": {"title": {}}}},
}
SUMMARY = 'summary_model = "demo"\nsummary_tokens = 16'
TURNS = [
    {"role": role, "content": f"def f{n}(a, b): return a + b  # é {n}\n" * 4}
    for n in range(12)
    for role in ("user", "assistant")
]
LONG = [{"role": "system", "content": "You write Python."}, *TURNS, {"role": "user", "content": "def last():"}]


async def test_a_chat_beyond_the_engines_limit_is_shortened_by_the_engines_own_count(
    replica: Replica, engine_dir: Path, tmp_path: Path
) -> None:
    urls = {replica.grpc_url: replica.metrics_url}
    ask: dict[str, Any] = {"model": "demo", "messages": LONG, "max_tokens": 24, "temperature": 0}
    for policy, more in (("drop_oldest", ""), ("keep_system", ""), ("summarise", SUMMARY)):
        config = CONFIG.format(url=replica.grpc_url, tokenizer=engine_dir / "tokenizer.json", policy=policy) + more
        async with gateway(config=config, metrics_urls=urls) as running:
            for tools in ([TOOL], None):
                status, headers, answer = await running.post("/v1/chat/completions", {**ask, "tools": tools})
                assert status == 200, answer
                assert headers["x-trident-context"].startswith(policy), headers
                # As much as fits: one turn more would be too much.
                assert 1024 - 24 - 330 < answer["usage"]["prompt_tokens"] <= 1024 - 24
    async with gateway(replicas=replica.grpc_url, metrics_urls=urls) as running:
        status, _, answer = await running.post("/v1/chat/completions", ask)
        assert (status, answer["error"]["param"]) == (400, "messages"), answer
