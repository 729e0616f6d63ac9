"""Every metric that docs/metrics.md names is on the page, and moves as it says."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
import tritonclient.grpc.aio as triton
from triton_requests import ask, metric, responses

from tests.end_to_end.watching import idle, left_in_time, until

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
REFUSED = {"name": "trident_errors_total", "model": "tokenizer", "error_type": "InvalidArgument"}
CALIBRATED = {"trident_engine_step_seconds"}  # there for an engine that was calibrated
REQUEST = {"text_input": "def fibonacci(n):\n", "max_tokens": 50, "ignore_eos": True, "stream": True}


def count(page, name: str, **labels: str) -> int:
    return int(metric(page, f"{name}_count", **labels))


@pytest.fixture(scope="module")
def measured(replica) -> tuple[dict[str, float], dict[str, float], int]:
    """The page before and after eight requests of 50 tokens, one refusal and one cancel; how often one left, of which
    only the last was in time."""
    ttft, phases = "gen_ai_server_time_to_first_token_seconds", "trident_time_to_first_token_phase_seconds"

    async def work():
        def first_is_counted(page) -> bool:
            """The supervisor's own request is counted by everything that counts it: a page may be read meanwhile."""
            requests = metric(page, "trident_requests_total")
            return count(page, ttft) == count(page, phases, phase="detokenize") == requests >= 1 and idle(page)

        before = await until(replica, first_is_counted)
        async with triton.InferenceServerClient(replica.grpc_url) as client:
            await asyncio.gather(*[ask(client, REQUEST) for _ in range(8)])
            await ask(client, {**REQUEST, "max_tokens": 0})

            async def leave() -> None:
                async for _ in responses(client, {**REQUEST, "max_tokens": 900}):
                    break

            left = await left_in_time(replica, leave)

        def all_is_counted(page) -> bool:
            firsts = [count(page, ttft) - count(before, ttft)]
            firsts.append(count(page, phases, phase="detokenize") - count(before, phases, phase="detokenize"))
            refused = metric(page, **REFUSED) - metric(before, **REFUSED)
            return firsts == [8 + left] * 2 and refused == 1 and idle(page)

        return before, await until(replica, all_is_counted), left

    return asyncio.run(work())


@pytest.fixture(scope="module")
def pages(measured) -> tuple[dict[str, float], dict[str, float]]:
    return measured[:2]


def documented() -> list[tuple[str, dict[str, str]]]:
    """(name, labels) of every row of the document's tables."""
    rows = re.findall(r"^\| `([a-z_]+)(?:\{([^}]*)\})?` \|", DOCUMENT.read_text(), re.MULTILINE)
    return [(name, dict(pair.split("=") for pair in labels.split(",") if "=" in pair)) for name, labels in rows]


@pytest.mark.parametrize(("name", "labels"), documented(), ids=lambda value: str(value))
def test_every_documented_metric_is_on_the_page(pages, name, labels):
    _, after = pages
    if name in CALIBRATED and not any(key.startswith(name) for key in after):
        pytest.skip("the engine was not calibrated")
    histogram = f"{name}_count" in {key.partition("{")[0] for key in after}
    assert metric(after, f"{name}_count" if histogram else name, **labels) >= 0


def test_every_metric_of_ours_is_documented(pages):
    names = {re.sub(r"_(bucket|count|sum)$", "", key.partition("{")[0]) for key in pages[1]}
    ours = {name for name in names if name.startswith(("trident_", "gen_ai_", "nv_trt_llm_", "nv_llm_"))}
    assert ours | CALIBRATED == {name for name, _ in documented()}


def test_tokens_requests_and_latencies_are_counted(measured):
    before, after, left = measured

    def grown(name: str, **labels: str) -> float:
        return metric(after, name, **labels) - metric(before, name, **labels)

    assert grown("trident_requests_total", finish_reason="length") == 8 + left - 1
    assert grown("trident_requests_total", finish_reason="cancelled") == 1
    assert grown("trident_cancellations_total", reason="client") == 1
    assert grown("trident_errors_total", model="tokenizer", error_type="InvalidArgument") == 1
    assert grown("trident_output_tokens_total") >= 400
    assert grown("gen_ai_server_time_to_first_token_seconds_count") == 8 + left
    assert grown("nv_llm_output_token_len_sum", response_metric_type="total_output_tokens") >= 400
    for phase in ("tokenize", "queue", "prefill", "first_decode", "detokenize"):
        assert grown("trident_time_to_first_token_phase_seconds_count", phase=phase) == 8 + left
    assert metric(after, "nv_trt_llm_request_metrics", request_type="active") == 0


def test_phases_add_up_to_the_time_to_first_token(pages):
    _, after = pages
    phases = sum(
        metric(after, "trident_time_to_first_token_phase_seconds_sum", phase=phase)
        for phase in ("tokenize", "queue", "prefill", "first_decode")
    )
    assert phases == pytest.approx(metric(after, "gen_ai_server_time_to_first_token_seconds_sum"), rel=1e-3)


def test_a_prompt_seen_before_is_counted_as_cached(replica, pages):
    prompt = "import os\n\n\nclass Reader:\n    def read(self, size):\n        return self.buffer[:size]\n" * 4

    async def twice():
        async with triton.InferenceServerClient(replica.grpc_url) as client:
            first = await ask(client, {**REQUEST, "text_input": prompt})
            return first, await ask(client, {**REQUEST, "text_input": prompt})

    first, second = asyncio.run(twice())
    assert first.outputs["num_cached_tokens"].item() == 0
    assert second.outputs["num_cached_tokens"].item() >= 32
    assert first.text == second.text
