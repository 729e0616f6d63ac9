"""The Triton models ``detokenizer`` and ``detokenizer_packed``: one instance, requests in order, no Triton error once a
stream runs.

They also detect disconnected clients: Triton marks only the request of the *next* step as cancelled, which is
theirs, so they check the mark and cancel the stream at the engine (python_backends/ensemble/control.py).
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import astuple
from typing import Any

import numpy as np

from contract import manifest as manifests
from contract import packed_delta, step_model
from contract.backend_settings import Settings
from contract.errors import EngineFailed, NotFound
from contract.generation import TokenDelta
from contract.manifest import EngineManifest
from python_backends.detokenizer.decoding import Decoding
from python_backends.detokenizer.request_id_streams import RequestIdStreams, RequestIdTable
from python_backends.detokenizer.streams import Streams, failed_delta
from python_backends.ensemble.control import ControlMessage, ControlSender, Verb
from python_backends.ensemble.token_increment import INSTANTS, StreamState, TokenIncrement
from python_backends.heartbeat import Heartbeat
from python_backends.metrics import PHASES, PHASES_HELP, TTFT_BUCKETS, AdapterMetrics, Metrics
from python_backends.triton_io import FINAL, Inputs, Request, log_error, metric_family, response, row, texts

# is_cancelled() is a call to the server process (11-22 µs), so it is made at most this often per stream. Together with
# the engine's probes of silent streams, as often, this bounds the time to detect a disconnect.
_CANCEL_CHECK_NS = 80_000_000
_METRICS_PERIOD_NS = 100_000_000


class InBandStreams:
    """Streams of a Python engine, which names each in its responses; see RequestIdStreams for the C++ backend."""

    def __init__(self, control_socket: str) -> None:
        self._control = ControlSender(control_socket)

    def read(self, request: Request, inputs: Inputs) -> TokenIncrement:
        """Return the increment that the detokenizer's input tensor holds."""
        return TokenIncrement.from_array(inputs.required("stream_state"))

    def stop(self, state: StreamState) -> bool:
        """End a stream in whose text a stop string matched; return whether the engine has the command."""
        return self._control.send(ControlMessage(Verb.STOP, state.epoch, state.key))

    def cancel(self, state: StreamState) -> bool:
        """End a stream whose client has disconnected; return whether the engine has the command."""
        return self._control.send(ControlMessage(Verb.CANCEL, state.epoch, state.key))

    def close(self) -> None:
        self._control.close()


class TritonPythonModel:
    """Triton's interface of a Python model."""

    def initialize(self, args: dict[str, str]) -> None:
        settings = Settings.from_env()
        manifest = manifests.load(settings.engine_dir)
        self._metrics = Metrics(metric_family)
        if manifest.kind == "trtllm":
            table = None if isinstance(self, PackedModel) else self._table(manifest)
            self._engine: RequestIdStreams | InBandStreams = RequestIdStreams(settings.metadata_socket, table)
        else:
            self._engine = InBandStreams(settings.control_socket)
        self._streams = Streams(Decoding.from_tokenizer(settings.engine_dir / "tokenizer.json"), self._engine.stop)
        self._checked_ns: dict[int, int] = {}
        self._flushed_ns = 0
        self._metrics.show_engine(settings.engine_dir, manifest)
        with contextlib.suppress(NotFound, EngineFailed):  # the supervisor has said why there is none
            for term, value in step_model.of_engine(settings.engine_dir).exported.items():
                self._metrics.gauge(step_model.METRIC, "What a part of an engine step takes", term=term)(value)
        self._metrics.flush()
        phase = {"model": "detokenizer", "phase": "detokenize"}
        self._detokenize_phase = self._metrics.histogram(PHASES, PHASES_HELP, TTFT_BUCKETS, **phase)
        name, what = args.get("model_name", "detokenizer"), "Streams that have started and not ended"
        self._open_streams = self._metrics.gauge("trident_open_streams", what, model=name)
        self._heartbeat = Heartbeat(settings.supervisor_socket)

    def _table(self, manifest: EngineManifest) -> RequestIdTable:
        """Return the table of all streams, which the model ``detokenizer`` has."""
        names = [adapter.name for adapter in manifest.adapters]
        counts = AdapterMetrics(self._metrics, names, model="engine", version="1")
        held = manifest.recipe.get("adapter_cache") or len(names)
        return RequestIdTable(adapter_cache=held, on_adapter=lambda n, cause: counts.accepted(names[n - 1], cause))

    def execute(self, requests: list[Request]) -> list[Any] | None:
        with self._heartbeat:
            for request in requests:
                sender, answer = request.get_response_sender(), self._answer(request)
                try:
                    sender.send(answer, flags=FINAL)
                except Exception as exc:  # such as no room in shared memory
                    sender.send(self._failed(exc), flags=FINAL)
        return None

    def _answer(self, request: Request) -> Any:
        """Return the response to one increment of the engine, None if it adds nothing for the client."""
        received_ns = time.monotonic_ns()
        try:
            increment = self._engine.read(request, Inputs(request))
            self._relay_cancel(request, increment.state)
            decoded = self._decode(increment, received_ns)
            return None if decoded is None else response(self._outputs(*decoded))
        except Exception as exc:  # the outer edge: an error here would leak the whole ensemble request
            return self._failed(exc)

    def _failed(self, exc: Exception) -> Any:
        log_error(f"detokenizer failed: error={exc!r}")
        return response(self._outputs(failed_delta(f"the detokenizer failed: {exc!r}"), 0.0))

    def _decode(self, increment: TokenIncrement, received_ns: int) -> tuple[TokenDelta, float] | None:
        try:
            decoded = self._streams.feed(increment, received_ns)
        except Exception as exc:  # the outer edge: one stream fails, the others go on
            log_error(f"decoding failed: stream={increment.state.key} error={exc!r}")
            self._streams.fail(increment.state)
            self._engine.cancel(increment.state)
            decoded = failed_delta(f"the detokenizer failed: {exc!r}", increment.state), 0.0
        self._observe(increment.state)
        return decoded

    def _relay_cancel(self, request: Request, state: StreamState) -> None:
        now_ns = time.monotonic_ns()
        if state.event.last:
            self._checked_ns.pop(state.key, None)
        elif now_ns - self._checked_ns.get(state.key, 0) >= _CANCEL_CHECK_NS:
            self._checked_ns[state.key] = now_ns
            if request.is_cancelled() and not self._engine.cancel(state):
                del self._checked_ns[state.key]  # check again with the next increment

    def _observe(self, state: StreamState) -> None:
        now_ns = time.monotonic_ns()
        if state.first and state.sent_ns:
            self._detokenize_phase((now_ns - state.sent_ns) / 1e9)
        # After the last stream has ended no call may follow that would show it.
        if now_ns - self._flushed_ns >= _METRICS_PERIOD_NS or not len(self._streams):
            self._flushed_ns = now_ns
            self._open_streams(len(self._streams))
            self._metrics.flush()

    def finalize(self) -> None:
        self._heartbeat.close()
        self._engine.close()

    @staticmethod
    def _outputs(delta: TokenDelta, cum_log_prob: float) -> dict[str, np.ndarray]:
        outputs = {"text_output": texts(delta.text), "output_ids": row(delta.token_ids)}
        if delta.log_probs:
            outputs["output_log_probs"] = np.array([[delta.log_probs]], dtype=np.float32)
            outputs["cum_log_probs"] = row([cum_log_prob], np.float32)
        if delta.top_log_probs:
            top = delta.top_log_probs
            outputs["top_log_probs_ids"] = np.array([[[id for id, _ in at] for at in top]], np.int32)
            outputs["top_log_probs"] = np.array([[[value for _, value in at] for at in top]], np.float32)
        if delta.finish_reason is None:
            if delta.prompt_ids:
                outputs["num_input_tokens"] = row([delta.prompt_ids])
            return outputs
        outputs["finish_reason"] = texts(delta.finish_reason.value)
        outputs["num_output_tokens"] = row([delta.usage.output_tokens if delta.usage else 0])
        if delta.stop_reason:
            outputs["stop_reason"] = texts(delta.stop_reason)
        if delta.error:
            outputs["error_message"] = texts(delta.error)
        if delta.usage is not None:
            outputs["num_input_tokens"] = row([delta.usage.input_tokens])
            outputs["num_cached_tokens"] = row([delta.usage.cached_tokens])
        if delta.timings is not None:
            instants = astuple(delta.timings)
            outputs |= {name: row([value], np.int64) for name, value in zip(INSTANTS.values(), instants, strict=False)}
            outputs["stage_time_ns"] = row(instants[len(INSTANTS) :], np.int64)
        return outputs


class PackedModel(TritonPythonModel):
    """The model ``detokenizer_packed``: one output, and a response to every increment, perhaps without any output."""

    def initialize(self, args: dict[str, str]) -> None:
        super().initialize(args)
        self._metrics.gauge(packed_delta.METRIC, "1: the server has the model ensemble_packed")(1)
        self._metrics.flush()

    def execute(self, requests: list[Request]) -> list[Any]:
        with self._heartbeat:
            return [self._answer(request) or response({}) for request in requests]

    @staticmethod
    def _outputs(delta: TokenDelta, cum_log_prob: float) -> dict[str, np.ndarray]:
        return {packed_delta.OUTPUT: np.frombuffer(packed_delta.pack(delta), dtype=np.uint8)[None]}
