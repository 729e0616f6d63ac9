"""Fresh and shared prompts in turns, on a measurement that says what a server with a prefix cache would."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from benchmarks import prefix
from benchmarks.measurement import ServerUnderTest
from contract.errors import EngineFailed


@pytest.fixture
def loads(monkeypatch):
    seen = []

    def measure(kind, load, server, extent):
        seen.append((kind, load, extent))
        shared = kind == prefix.SHARED
        figures = SimpleNamespace(failed=0, ttft_s=SimpleNamespace(p50=0.1 if shared else 0.4))
        return SimpleNamespace(figures=figures, server=SimpleNamespace(cached_tokens=75 * shared, input_tokens=100))

    monkeypatch.setattr(
        prefix, "running_server", lambda engine: nullcontext(ServerUnderTest("h:1", "http://h:2", None))
    )
    monkeypatch.setattr(prefix.measurement, "measure", measure)
    return seen


def test_shared_prompts_are_in_the_cache_before_they_are_measured_and_change_with_the_round(loads, tmp_path):
    assert prefix.run("demo", [1], 2, tmp_path) == 0
    kept = json.loads((tmp_path / "prefix.json").read_text())["compared"]
    assert (
        kept["TTFT p50, ms: fresh, 1"]["values"] == [400, 400] and kept["TTFT p50, ms: shared, 1"]["values"][0] == 100
    )
    assert kept["from the cache: shared, 1"]["values"] == [0.75, 0.75]
    kinds = [(kind, extent.requests) for kind, _, extent in loads]
    assert kinds == 3 * [("fresh", 8), ("shared", 1), ("shared", 8)]
    prefixes = {
        load.request(n, prefix_words).prompt[:40] for kind, load, _ in loads if kind == "shared" for n in (0, 1)
    }
    assert len(prefixes) == 3


def test_a_failed_request_ends_it(loads, tmp_path, monkeypatch):
    failed = SimpleNamespace(figures=SimpleNamespace(failed=2), server=None)
    monkeypatch.setattr(prefix.measurement, "measure", lambda *_: failed)
    with pytest.raises(EngineFailed, match="2 requests failed, metrics: False"):
        prefix.run("demo", [1], 1, tmp_path)


class prefix_words:  # noqa: N801
    """Prompts whose words are of the random generator that they are given."""

    @staticmethod
    def text(rng, tokens, prefix=""):
        return prefix or f"{rng.random():.20f}" * 3
