"""The engine process: OpenVINO GenAI's continuous-batching pipeline and its step loop, nothing else.

``step()`` holds the interpreter lock, so the loop shares an interpreter with nobody: the Triton-side model sends
commands and receives one message per step with every sequence's new tokens (python_backends/cpu_engine/link.py
starts this module and speaks with it). The process ends when its connection does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import openvino as ov
import openvino_genai as genai

from contract import manifest as manifests
from contract.generation import SamplingParams
from python_backends.cpu_engine.pipeline import open_pipeline
from python_backends.cpu_engine.top_log_probs import TopLogProbsModel
from python_backends.ensemble.stream_state import StreamEvent
from python_backends.ensemble.worker_messages import AddSequence, EndSequence, Failed, Ready, StepOutput, StepReport

_NICE = 5


class StepLoop:
    """Owns the pipeline and its live handles. ``run`` returns when the connection is closed."""

    def __init__(
        self, pipeline: genai.ContinuousBatchingPipeline, top_log_probs: TopLogProbsModel, connection: Connection
    ) -> None:
        self._pipeline = pipeline
        self._top_log_probs = top_log_probs
        self._connection = connection
        self._handles: dict[int, genai.GenerationHandle] = {}
        self._without_token: dict[int, int] = {}  # id -> prompt tokens
        self._ended: list[StepOutput] = []

    def run(self) -> None:
        while True:
            # Block only when there is nothing to step: an idle engine costs nothing.
            while self._connection.poll(0 if self._handles else None):
                self._obey(self._connection.recv())
            start_ns = time.monotonic_ns()
            self._pipeline.step()
            self._connection.send(self._report(start_ns))

    def _obey(self, command: AddSequence | EndSequence) -> None:
        if isinstance(command, AddSequence):
            self._add(command)
        else:
            self._end(command.id)

    def _add(self, command: AddSequence) -> None:
        config = generation_config(command.max_tokens, command.sampling, command.stop_ids)
        try:
            handle = self._pipeline.add_request(command.id, ov.Tensor(command.input_ids[None]), config)
        except RuntimeError as exc:
            rejected = StepOutput(command.id, [], [], StreamEvent.ERROR, rejected=_last_line(exc))
            self._connection.send(StepReport(0, 0, [rejected]))
            return
        self._handles[command.id] = handle
        if command.sampling.top_log_probs:
            self._top_log_probs.open(command.id, command.input_ids, command.sampling.top_log_probs)
        self._without_token[command.id] = command.input_ids.size

    def _end(self, id: int) -> None:
        handle = self._handles.pop(id, None)
        self._without_token.pop(id, None)
        self._top_log_probs.close(id)
        if handle is not None:
            handle.cancel()
            self._ended.append(StepOutput(id, [], [], StreamEvent.CANCELLED))
            if not self._handles:
                # A cancelled sequence's blocks are freed by the step after it; nobody else would make that step.
                self._pipeline.step()
                self._connection.send(self._report(time.monotonic_ns()))

    def _report(self, start_ns: int) -> StepReport:
        outputs = self._take_ended()
        for id, handle in list(self._handles.items()):
            output = self._read(id, handle)
            if output is not None:
                outputs.append(output)
        metrics = self._pipeline.get_metrics()
        return StepReport(
            start_ns,
            time.monotonic_ns(),
            outputs,
            metrics.scheduled_requests,
            len(self._without_token),
            sum(self._without_token.values()),
            metrics.cache_usage / 100,
        )

    def _take_ended(self) -> list[StepOutput]:
        ended, self._ended = self._ended, []
        return ended

    def _read(self, id: int, handle: genai.GenerationHandle) -> StepOutput | None:
        token_ids: list[int] = []
        log_probs: list[float] = []
        finish = genai.GenerationFinishReason.NONE
        # read() on an empty queue would block for ever, with the interpreter lock held.
        while handle.can_read():
            for output in handle.read().values():
                token_ids += output.generated_ids
                log_probs += output.generated_log_probs
                finish = output.finish_reason
        event = StreamEvent.RUNNING
        status = handle.get_status()
        if status == genai.GenerationStatus.IGNORED:
            event = StreamEvent.ERROR
        elif status != genai.GenerationStatus.RUNNING:
            event = StreamEvent.LENGTH if finish == genai.GenerationFinishReason.LENGTH else StreamEvent.STOP
        if token_ids:
            self._without_token.pop(id, None)
        top = self._top_log_probs.read(id, token_ids)
        if top:
            log_probs = [entry.chosen for entry in top]
        if event.last:
            del self._handles[id]
            self._without_token.pop(id, None)
            self._top_log_probs.close(id)
        elif not token_ids:
            return None
        rejected = "the KV cache ran out of blocks" if event is StreamEvent.ERROR else ""
        return StepOutput(id, token_ids, log_probs, event, top, rejected)


def generation_config(max_tokens: int, sampling: SamplingParams, stop_ids: frozenset[int]) -> genai.GenerationConfig:
    """OpenVINO GenAI's form of the sampling parameters; ``stop_ids`` is the whole truth about what ends a sequence.

    Left without an end id, the pipeline would take the ones of generation_config.json; naming any one stop id as the
    end id keeps it from that, and ``ignore_eos`` does where there is none (it would also ignore stop ids).
    """
    config = genai.GenerationConfig()
    config.max_new_tokens = max_tokens
    if stop_ids:
        config.set_eos_token_id(min(stop_ids))
        config.stop_token_ids = set(stop_ids)
    else:
        config.ignore_eos = True
    config.min_new_tokens = min(sampling.min_tokens, max_tokens) if stop_ids else 0
    config.repetition_penalty = sampling.repetition_penalty
    config.presence_penalty = sampling.presence_penalty
    config.frequency_penalty = sampling.frequency_penalty
    config.logprobs = int(sampling.log_probs or sampling.top_log_probs > 0)
    config.do_sample = not sampling.greedy
    if config.do_sample:
        config.temperature = sampling.temperature
        config.top_p = sampling.top_p
        config.min_p = sampling.min_p
        if sampling.top_k:
            config.top_k = sampling.top_k
        config.rng_seed = (
            fold_seed(sampling.seed) if sampling.seed is not None else int.from_bytes(os.urandom(4), "little")
        )
    return config


def fold_seed(seed: int) -> int:
    """A uint64 seed in the 32 bits that GenAI heeds: a small one as it is; seeds that differ only in the high half
    differ still, and are not the small ones' doubles."""
    return (seed ^ (seed >> 32) * 0x9E3779B1) & 0xFFFFFFFF


def _last_line(exc: Exception) -> str:
    """What a GenAI error says, without the source paths of its build."""
    return str(exc).strip().splitlines()[-1]


def _step_aside() -> None:
    """The step loop takes every cycle it gets; what carries its tokens away, clients included, must come first.

    A session of its own is a scheduling group of its own on kernels that group by session; in the server's group the
    loop starved readers outside it for up to a second on two cores (benchmarks/LOG.md).
    """
    os.setsid()
    os.nice(_NICE)
    with contextlib.suppress(OSError):  # a kernel without such groups
        Path("/proc/self/autogroup").write_text(str(_NICE))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is for the server, which drains first
    descriptor, engine_dir = int(sys.argv[1]), Path(sys.argv[2])
    _step_aside()
    connection = Connection(descriptor)
    try:
        manifest = manifests.load(engine_dir)
        pipeline = open_pipeline(engine_dir, manifest)
        connection.send(Ready())
        top_log_probs = TopLogProbsModel(engine_dir / "openvino_model.xml", manifest.properties)
        StepLoop(pipeline, top_log_probs, connection).run()
    except (EOFError, ConnectionError):
        return  # the model that started us has gone
    except Exception as exc:
        connection.send(Failed(_last_line(exc)))
        raise


if __name__ == "__main__":
    main()
