"""The pipeline in a process of its own; tests/end_to_end and the efficiency benchmark drive a whole one."""

import time
from concurrent.futures import ThreadPoolExecutor

import psutil
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
    assert all(0 < ttft_s <= answer["wall_s"] for ttft_s in answer["ttfts_s"])


@pytest.mark.slow
def test_a_batch_that_still_runs_is_ended_with_its_process(tiny_engine):
    with ThreadPoolExecutor() as pool, RawEngine(tiny_engine) as raw:
        child = psutil.Process(raw._process.pid)
        idle_s = child.cpu_times().user
        batch = pool.submit(raw.batch, [[5, 6, 7]] * 4000, 40, 1)
        while child.cpu_times().user < idle_s + 0.2:
            time.sleep(0.05)
        raw.__exit__()
        with pytest.raises(EngineFailed, match="ended with code -15"):
            batch.result()
