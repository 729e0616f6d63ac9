"""Drive OpenVINO's pipeline in process, without any server: the baseline for the cost of serving.

    python -m benchmarks.raw_engine ENGINE_FOLDER

reads one JSON line per batch, ``{"prompts": [[ids], …], "max_tokens": n, "concurrency": n}``, and answers with one:
tokens, wall seconds, CPU seconds, and the time to first token of every request. The pipeline is that of the worker.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.child_process import ROOT, stop
from contract.errors import EngineFailed


class RawEngine:
    """The process that holds the pipeline; a context manager. Raises EngineFailed: it cannot be loaded."""

    def __init__(self, folder: Path) -> None:
        command, pipe = [sys.executable, "-m", "benchmarks.raw_engine", str(folder)], subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
        self._answer()

    def __enter__(self) -> RawEngine:
        return self

    def __exit__(self, *_exc: object) -> None:
        stop(self._process)

    def batch(self, prompts: Sequence[Sequence[int]], max_tokens: int, concurrency: int) -> dict:
        """Run one batch; return {"tokens", "wall_s", "cpu_s", "ttfts_s"}."""
        request = {"prompts": [list(ids) for ids in prompts], "max_tokens": max_tokens, "concurrency": concurrency}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            stop(self._process)
            raise EngineFailed(f"the raw engine ended with code {code}")
        return json.loads(line)


def main(folder: Path) -> None:
    # Not above: the parent process does not need them.
    import numpy as np
    import openvino as ov

    from contract import manifest
    from contract.generation import SamplingParams
    from python_backends.cpu_engine.worker import generation_config, open_pipeline

    pipeline = open_pipeline(folder, manifest.load(folder))
    print(json.dumps("loaded"), flush=True)
    next_id = 0
    greedy = SamplingParams(temperature=0.0)
    for line in sys.stdin:
        request = json.loads(line)
        waiting = [np.array([ids], dtype=np.int64) for ids in reversed(request["prompts"])]
        config = generation_config(request["max_tokens"], greedy, frozenset())
        live: dict[int, tuple] = {}  # id -> (handle, instant it was added, its index in ttfts)
        ttfts: list[float | None] = []
        tokens = 0
        started_s, cpu_s = time.perf_counter(), time.process_time()
        while waiting or live:
            while waiting and len(live) < request["concurrency"]:
                next_id += 1
                handle = pipeline.add_request(next_id, ov.Tensor(waiting.pop()), config)
                live[next_id] = (handle, time.perf_counter(), len(ttfts))
                ttfts.append(None)
            pipeline.step()
            now_s = time.perf_counter()
            for number, (handle, added_s, index) in list(live.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        tokens += len(output.generated_ids)
                        if ttfts[index] is None and output.generated_ids:
                            ttfts[index] = now_s - added_s
                if handle.get_status().name != "RUNNING":
                    del live[number]
        answer = {"tokens": tokens, "wall_s": time.perf_counter() - started_s, "cpu_s": time.process_time() - cpu_s}
        print(json.dumps(answer | {"ttfts_s": ttfts}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
