"""The Triton model ``detokenizer``: one instance, in order, never an error once a stream runs.

It is also where a client's going is noticed: Triton marks only a step's *next* request as cancelled, which is the
one this model gets, so it looks and sends word to the engine (python_backends/ensemble/control.py).
"""

from __future__ import annotations

import time

import numpy as np

from contract import manifest as manifests
from python_backends.detokenizer.decoding import Decoding
from python_backends.detokenizer.in_band_streams import InBandStreams
from python_backends.detokenizer.request_id_streams import RequestIdStreams
from python_backends.detokenizer.streams import EngineChunk, Piece, Streams, failed_piece
from python_backends.ensemble.stream_state import StreamState
from python_backends.heartbeat import Heartbeat
from python_backends.metrics import PHASES, PHASES_HELP, TTFT_BUCKETS, Metrics
from python_backends.settings import Settings
from python_backends.triton_io import FINAL, Inputs, log_error, metric_family, response, row, texts

# Asking Triton whether a request was cancelled is a call to the server process (11-22 µs), so each stream is asked
# about at most this often; with the engine's probes of silent streams that bounds the time to notice.
_CANCEL_CHECK_NS = 40_000_000
_METRICS_PERIOD_NS = 100_000_000


class TritonPythonModel:
    def initialize(self, args: dict) -> None:
        settings = Settings.from_env()
        manifest = manifests.load(settings.engine_dir)
        if manifest.kind == "trtllm":
            self._engine = RequestIdStreams(settings.metadata_socket)
        else:
            self._engine = InBandStreams(settings.control_socket)
        self._streams = Streams(Decoding.from_tokenizer(settings.engine_dir / "tokenizer.json"), self._engine.stop)
        self._checked_ns: dict[int, int] = {}
        self._metrics = Metrics(metric_family)
        self._flushed_ns = 0
        # Which engine answers here: caches in front of the server key what they keep by it.
        digest = manifests.sha256_file(settings.engine_dir / manifests.FILE_NAME)
        self._metrics.gauge(
            "trident_engine_info",
            "1, and which engine it is",
            engine=manifest.name,
            kind=manifest.kind,
            manifest_sha256=digest,
        )(1)
        self._metrics.flush()
        self._detokenize_phase = self._metrics.histogram(
            PHASES, PHASES_HELP, TTFT_BUCKETS, model="detokenizer", phase="detokenize"
        )
        self._open_streams = self._metrics.gauge(
            "trident_open_streams", "Streams whose text is under way", model="detokenizer"
        )
        self._heartbeat = Heartbeat(settings.supervisor_socket)

    def execute(self, requests: list) -> None:
        with self._heartbeat:
            self._execute(requests)

    def _execute(self, requests: list) -> None:
        received_ns = time.monotonic_ns()
        for request in requests:
            sender = request.get_response_sender()
            try:
                chunk = self._engine.chunk(request, Inputs(request))
                self._relay_cancel(request, chunk.state)
                piece = self._piece(chunk)
                if piece is None:
                    sender.send(flags=FINAL)
                else:
                    sender.send(response(_outputs(chunk.state, piece, received_ns)), flags=FINAL)
            except Exception as exc:  # the outer edge: an error here would leak the whole ensemble request
                log_error(f"detokenizer: {exc!r}")
                sender.send(response(_outputs(None, failed_piece(_failure(exc)))), flags=FINAL)

    def _piece(self, chunk: EngineChunk) -> Piece | None:
        try:
            piece = self._streams.feed(chunk)
        except Exception as exc:  # one stream's text could not be made: it ends, the others go on
            log_error(f"detokenizer: stream {chunk.state.key}: {exc!r}")
            self._streams.fail(chunk.state)
            self._engine.cancel(chunk.state)
            piece = failed_piece(_failure(exc))
        self._observe(chunk.state)
        return piece

    def _relay_cancel(self, request, state: StreamState) -> None:
        now_ns = time.monotonic_ns()
        if state.event.last:
            self._checked_ns.pop(state.key, None)
        elif now_ns - self._checked_ns.get(state.key, 0) >= _CANCEL_CHECK_NS:
            self._checked_ns[state.key] = now_ns
            if request.is_cancelled() and not self._engine.cancel(state):
                del self._checked_ns[state.key]  # to be told with the next chunk

    def _observe(self, state: StreamState) -> None:
        now_ns = time.monotonic_ns()
        if state.first and state.sent_ns:
            self._detokenize_phase((now_ns - state.sent_ns) / 1e9)
        # The last stream's end is shown at once: nobody may come later to show it.
        if now_ns - self._flushed_ns >= _METRICS_PERIOD_NS or not len(self._streams):
            self._flushed_ns = now_ns
            self._open_streams(len(self._streams))
            self._metrics.flush()

    def finalize(self) -> None:
        self._heartbeat.close()
        self._engine.close()


def _failure(exc: Exception) -> str:
    return f"the detokenizer failed: {exc!r}"


def _outputs(state: StreamState | None, piece: Piece, received_ns: int = 0) -> dict[str, np.ndarray]:
    """received_ns: when this model got what the piece was made of."""
    outputs = {"text_output": texts(piece.text), "output_ids": row(piece.token_ids)}
    if piece.log_probs:
        outputs["output_log_probs"] = np.array([[piece.log_probs]], dtype=np.float32)
        outputs["cum_log_probs"] = row([piece.cum_log_prob], np.float32)
    if piece.top:
        outputs["top_log_probs_ids"] = np.array([[ids for ids, _ in piece.top]], dtype=np.int32)
        outputs["top_log_probs"] = np.array([[log_probs for _, log_probs in piece.top]], dtype=np.float32)
    if piece.finish_reason is None:
        return outputs
    outputs["finish_reason"] = texts(piece.finish_reason.value)
    outputs["num_output_tokens"] = row([piece.num_output_tokens])
    if piece.stop_reason:
        outputs["stop_reason"] = texts(piece.stop_reason)
    if piece.error:
        outputs["error_message"] = texts(piece.error)
    if state is not None:
        outputs["num_input_tokens"] = row([state.num_input_tokens])
        outputs["num_cached_tokens"] = row([state.num_cached_tokens])
        if piece.timings and state.arrival_ns:
            outputs["arrival_time_ns"] = row([state.arrival_ns], np.int64)
            outputs["first_scheduled_time_ns"] = row([state.first_scheduled_ns], np.int64)
            outputs["first_token_time_ns"] = row([state.first_token_ns], np.int64)
            outputs["last_token_time_ns"] = row([state.last_token_ns], np.int64)
            outputs["stage_time_ns"] = row([piece.tokenized_ns, received_ns, time.monotonic_ns()], np.int64)
    return outputs
