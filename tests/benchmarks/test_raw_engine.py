"""The pipeline in a process of its own; tests/end_to_end and the efficiency benchmark drive a whole one."""

import pytest

from benchmarks.raw_engine import RawEngine
from contract.errors import EngineFailed


@pytest.mark.slow
def test_a_folder_that_is_no_engine_ends_it_with_an_error(tmp_path):
    with pytest.raises(EngineFailed, match="the raw engine ended with code 1"):
        RawEngine(tmp_path)


@pytest.mark.slow
def test_a_batch_has_a_first_token_for_every_prompt(tiny_engine):
    with RawEngine(tiny_engine) as raw:
        answer = raw.batch([[5, 6, 7], [8, 9], [1]], max_tokens=4, concurrency=2)
    assert answer["tokens"] == 12 and len(answer["ttfts_s"]) == 3
    assert all(0 < ttft_s <= answer["wall_s"] for ttft_s in answer["ttfts_s"]) and raw.load_s > 0
