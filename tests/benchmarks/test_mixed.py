"""Streams with and without long prompts beside them, on a fake replica."""

import pytest

from benchmarks import mixed
from benchmarks.measurement import ServerUnderTest
from benchmarks.prompts import Prompts
from contract.errors import EngineFailed, Unavailable
from contract.generation import FinishReason
from tests.fakes.replica import FakeReplica, Script


@pytest.mark.slow
async def test_a_phase_tells_the_gaps_of_the_streams_and_the_first_token_of_long_prompts(monkeypatch):
    def script(seen):
        return Script(tuple("abcdefgh"), FinishReason.LENGTH, first_token_s=0.01, gap_s=0.01)

    async with FakeReplica(script) as server:
        found = await mixed.phase(ServerUnderTest(server.url), Prompts(), 2, 300, 0.4, 1)
        assert found["ITL p50, ms"] >= 10 and found[mixed.RATIO] >= 1 and found["tokens/s"] > 10
        assert found["TTFT of long prompts p50, ms"] >= 10 and found["long prompts"] >= 1
        started, streams_when_made = server.counts.started, []

        class Noted(Prompts):
            def text(self, rng, tokens, prefix=""):
                streams_when_made.extend([server.counts.started - started] * (tokens == 300))
                return super().text(rng, tokens, prefix)

        await mixed.phase(ServerUnderTest(server.url), Noted(), 1, 300, 0.0, 1)
        assert set(streams_when_made) == {0}  # making a long prompt while streams are read would delay them
        alone = await mixed.phase(ServerUnderTest(server.url), Prompts(), 2, 0, 0.4, 1)
        assert "long prompts" not in alone
    with pytest.raises(Unavailable):
        await mixed.phase(ServerUnderTest("127.0.0.1:9"), Prompts(), 1, 0, 0.1, 1)
    monkeypatch.setattr(mixed, "LIMIT_S", 0.05)
    async with FakeReplica(lambda seen: Script(("a",), FinishReason.LENGTH, first_token_s=9.0)) as server:
        with pytest.raises(EngineFailed, match="fewer than 2 messages of 1 streams in 0.05 s"):
            await mixed.phase(ServerUnderTest(server.url), Prompts(), 1, 0, 0.0, 1)
