"""The Triton model ``engine`` on a CPU: requests as tensors in, responses out. It never blocks Triton's thread."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import numpy as np

from contract import manifest as manifests
from contract.backend_settings import Settings
from contract.errors import EngineFailed, InvalidArgument, TridentError, of_ours
from contract.generation import Guide
from contract.priority import read
from contract.watchdog import Watchdog
from python_backends.adapters import AdapterIds
from python_backends.cpu_engine import ticker
from python_backends.cpu_engine.engine import Engine, Link
from python_backends.cpu_engine.link import Listener, WorkerLink
from python_backends.cpu_engine.metrics import EngineMetrics
from python_backends.cpu_engine.packed_sink import OUTPUTS, CachedAnswer, PackedSink
from python_backends.cpu_engine.request import EngineRequest, gathered, parse
from python_backends.cpu_engine.stream import Sink
from python_backends.detokenizer.decoding import Decoding
from python_backends.detokenizer.streams import Streams
from python_backends.ensemble.control import ControlListener, ControlMessage, Verb
from python_backends.ensemble.token_increment import INSTANTS, StreamState, TokenIncrement
from python_backends.grammar.checker import NO_VOCABULARY, GrammarChecker
from python_backends.heartbeat import Heartbeat
from python_backends.limits import EngineLimits
from python_backends.metrics import Metrics
from python_backends.triton_io import (
    FINAL,
    Inputs,
    Request,
    ResponseSender,
    error_response,
    infer,
    metric_family,
    parameters,
    response,
    row,
)

# A request that the tokenizer got so lately is not asked whether its client has gone: that call waits for the server,
# and those behind it wait too. A probe finds such a client (ticker.py).
_UNASKED_NS = 50_000_000


class ResponseSink:
    """Write a stream's responses as the output tensors that the request names."""

    def __init__(self, sender: ResponseSender, requested: set[str], inputs: Inputs) -> None:
        self._sender = sender
        self._requested = requested
        self._state_only = requested == {"stream_state"}
        self._log_probs = inputs.scalar("return_log_probs", False) or inputs.scalar("num_top_log_probs", 0) > 0
        self._perf = inputs.scalar("return_perf_metrics", False)
        self._input_count = inputs.scalar("return_num_input_tokens", False)
        self._output_count = inputs.scalar("return_num_output_tokens", False)

    def send(self, increment: TokenIncrement, request: EngineRequest) -> None:
        outputs = {}
        if not self._state_only:
            outputs = {name: array for name, array in self._contract(increment).items() if name in self._requested}
        if "stream_state" in self._requested:
            outputs["stream_state"] = increment.to_array()
        # The final flag is sent with the last tokens, so that no empty response follows them.
        self._sender.send(response(outputs), flags=FINAL if increment.state.event.last else 0)

    def _contract(self, increment: TokenIncrement) -> dict[str, np.ndarray]:
        state = increment.state
        outputs = {
            "output_ids": np.array([[increment.token_ids]], dtype=np.int32),
            "sequence_length": row([len(increment.token_ids)]),
        }
        if self._log_probs and (increment.log_probs or state.event.last):
            outputs["output_log_probs"] = np.array([[increment.log_probs]], dtype=np.float32)
            outputs["cum_log_probs"] = row([increment.cum_log_prob], np.float32)
        if increment.top_log_probs:
            top = increment.top_log_probs
            outputs["top_log_probs_ids"] = np.array([[entry.ids for entry in top]], dtype=np.int32)
            outputs["top_log_probs"] = np.array([[entry.log_probs for entry in top]], dtype=np.float32)
        if self._input_count:
            outputs["num_input_tokens"] = row([state.num_input_tokens])
        if self._output_count:
            outputs["num_output_tokens"] = row([increment.num_output_tokens])
        if self._perf and state.event.last:
            outputs |= {name: row([getattr(state, field)], np.int64) for field, name in INSTANTS.items()}
        return outputs

    def refuse(self, error: TridentError) -> None:
        self._sender.send(error_response(error), flags=FINAL)

    def close(self) -> None:
        self._sender.send(flags=FINAL)


class TritonPythonModel:
    """Triton's interface of a Python model."""

    load_timeout_s = 300

    def open_link(self, engine_dir: Path, listener: Listener) -> Link:
        """Start what computes the ids; engines of this contract differ in nothing else."""
        watchdog = Watchdog(self._settings.stall_s, self._settings.step_limit_s)
        return WorkerLink(engine_dir, listener, watchdog, self._heartbeat.engine_hung)

    def initialize(self, args: dict[str, str]) -> None:
        settings = self._settings = Settings.from_env()
        self._heartbeat = Heartbeat(settings.supervisor_socket)
        manifest = manifests.load(settings.engine_dir)
        self._limits = EngineLimits.from_manifest(manifest)
        self._adapters = AdapterIds.from_manifest(manifest)
        self._whole_answer_timeout_ns = settings.whole_answer_timeout_s * 1_000_000_000
        names = args["model_name"], args["model_version"], self._adapters.names
        self._metrics = EngineMetrics(Metrics(metric_family), *names, drafts=self._limits.max_draft_len > 0)
        self._engine = Engine(
            self._limits,
            lambda engine: self.open_link(settings.engine_dir, engine),
            self._metrics,
            max_waiting=settings.max_waiting,
            sender_threads=settings.sender_threads,
            max_coalesce_ns=int(settings.max_coalesce_s * 1e9),
            prefix_reuse=bool(manifest.recipe["prefix_reuse"]),
            half_closed=partial(ticker.half_closed, settings.http_port),
        )
        # Meanwhile the engine process loads the model.
        self._decoding = Decoding.from_tokenizer(settings.engine_dir / "tokenizer.json")
        if not self._engine.wait_until_ready(self.load_timeout_s):
            self._engine.close()
            self._heartbeat.close()
            raise EngineFailed(f"the engine process does not load {settings.engine_dir}; see the lines above")
        self._grammars = GrammarChecker.open(settings, manifest)
        self._cached_answer = CachedAnswer(infer)
        self._control = ControlListener(settings.control_socket, self._engine.on_control)

    def execute(self, requests: list[Request]) -> None:
        with self._heartbeat:
            self._execute(requests)

    def _execute(self, requests: list[Request]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                inputs, outputs = Inputs(request), set(request.requested_output_names())
                self._submit(request, sender, inputs, self._sink(sender, outputs, inputs))
            except Exception as exc:  # the outer edge: a defect becomes a well-formed response
                error = of_ours(exc, "the engine could not read the request")
                self._engine.refused(error)
                sender.send(error_response(error), flags=FINAL)

    def _sink(self, sender: ResponseSender, outputs: set[str], inputs: Inputs) -> Sink:
        if outputs == OUTPUTS:
            streams = Streams(self._decoding, self._stop_matched)
            return PackedSink(sender, streams, self._cached_answer, lambda: len(self._engine), self._metrics.decoded)
        return ResponseSink(sender, outputs, inputs)

    def _stop_matched(self, state: StreamState) -> bool:
        self._engine.on_control(ControlMessage(Verb.STOP, state.epoch, state.key))
        return True

    def _submit(self, request: Request, sender: ResponseSender, inputs: Inputs, sink: Sink) -> None:
        if inputs.scalar("stop", False):
            self._stop(request, sender)
            return
        timeout_ns = request.timeout() * 1000
        limit_ns = self._whole_answer_timeout_ns
        if limit_ns and gathered(inputs):
            timeout_ns = min(timeout_ns or limit_ns, limit_ns)
        priority = read(parameters(request))
        now_ns = time.monotonic_ns()
        parsed = parse(inputs, self._limits, request.request_id(), timeout_ns, now_ns, priority, self._adapters)
        if not 0 < now_ns - parsed.arrival_ns < _UNASKED_NS and request.is_cancelled():
            sender.send(flags=FINAL)
            return
        if parsed.guide is None:
            self._engine.submit(parsed, sink)
            return
        if self._grammars is None:
            raise InvalidArgument("guided_decoding_guide_type", NO_VOCABULARY)
        key = self._engine.submit(parsed, sink, held=True)
        try:
            self._grammars.check(parsed.guide, partial(self._guide_checked, key), needed=lambda: key in self._engine)
        except TridentError as exc:
            self._guide_checked(key, exc)

    def _guide_checked(self, key: int, guide: Guide | TridentError) -> None:
        try:
            self._engine.guide_checked(key, guide)
        except Exception as exc:  # the outer edge: a defect must not end the checker's thread
            self._engine.guide_checked(key, of_ours(exc, "the engine could not start the request"))

    def _stop(self, request: Request, sender: ResponseSender) -> None:
        """End the streams of the request id. As with TensorRT-LLM, the response is empty, also if there were none."""
        if not request.request_id():
            raise InvalidArgument("request_id", "must be the id of the request to stop, got an empty one")
        self._engine.stop_request(request.request_id())
        empty = {"output_ids": np.zeros((1, 1, 0), dtype=np.int32), "sequence_length": row([0])}
        sender.send(response(empty), flags=FINAL)

    def finalize(self) -> None:
        self._control.close()
        if self._grammars is not None:
            self._grammars.close()
        self._engine.close()
        self._heartbeat.close()
