"""The Triton model ``encoder``: batches of requests that Triton gathered in, embeddings or scores of each out."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from contract import manifest as manifests
from contract.backend_settings import Settings
from contract.encoder import Encoder
from contract.errors import Cancelled, EngineFailed, TridentError, Unavailable, of_ours
from python_backends.encoder.forward import Forward
from python_backends.encoder.request import EncoderRequest, parse
from python_backends.encoder.tokens import Tokens
from python_backends.heartbeat import Heartbeat
from python_backends.metrics import DURATION_BUCKETS, Metrics
from python_backends.triton_io import Inputs, Request, error_response, metric_family, response

_ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64)


class EncoderMetrics:
    """TensorRT-LLM's families, as far as they have a meaning here, and the batches. Updated by the thread that runs
    the model. slots: requests that it runs at once."""

    def __init__(self, metrics: Metrics, model: str, version: str, slots: int) -> None:
        names = {"model": model, "version": version}
        self._metrics = metrics
        self._running = {
            state: metrics.gauge("nv_trt_llm_request_metrics", "Requests by state", **names, request_type=state)
            for state in ("active", "scheduled", "max", "waiting", "context")
        }
        counter = {"general_type": "iteration_counter"}
        self._steps = metrics.gauge("nv_trt_llm_general_metrics", "Forward passes", **names, **counter)
        self._input_tokens = metrics.counter("trident_input_tokens_total", "Tokens of accepted inputs", **names)
        self._requests = metrics.counter("trident_requests_total", "Finished requests", **names, finish_reason="stop")
        self._rows = metrics.histogram("trident_encoder_batch_rows", "Texts of a forward pass", _ROW_BUCKETS, **names)
        self._padded = metrics.counter("trident_encoder_padded_tokens_total", "Tokens computed, with padding", **names)
        name, what = "gen_ai_server_request_duration_seconds", "Time of a batch of requests"
        self._seconds = metrics.histogram(name, what, DURATION_BUCKETS, **names)
        self.refused = metrics.errors(**names)
        self._running["max"](slots)
        self._passes = 0
        self.ended(time.monotonic())

    def began(self, requests: int) -> None:
        """Show a batch of requests that begins."""
        self._running["active"](requests)
        self._running["scheduled"](requests)
        self._metrics.flush()

    def passed(self, rows: int, tokens: int) -> None:
        """Count one forward pass. tokens: with padding."""
        self._passes += 1
        self._rows(rows)
        self._padded(tokens)

    def done(self, tokens: int) -> None:
        """Count a finished request of that many tokens."""
        self._requests(1)
        self._input_tokens(tokens)

    def ended(self, began_s: float) -> None:
        """Show that nothing runs, and send everything pending."""
        for state in ("active", "scheduled", "waiting", "context"):
            self._running[state](0)
        if self._passes:
            self._seconds(time.monotonic() - began_s)
        self._steps(self._passes)
        self._metrics.flush()


class TritonPythonModel:
    """Triton's interface of a Python model."""

    def initialize(self, args: dict[str, str]) -> None:
        settings = Settings.from_env()
        self._heartbeat = Heartbeat(settings.supervisor_socket)
        self._drain_file = settings.drain_file
        folder, manifest = settings.engine_dir, manifests.load(settings.engine_dir)
        if manifest.encoder is None:
            raise EngineFailed(f"{folder} is of kind {manifest.kind!r}, which is no encoder")
        self._kind, self._encoder = manifest.kind, Encoder.from_manifest(manifest.encoder)
        longest = manifest.max_seq_len
        self._tokens = Tokens(folder, self._encoder, longest, manifest.vocab_size)
        rows, tokens = manifest.max_batch_size, manifest.max_num_tokens
        self._forward = Forward(folder, manifest.properties, rows, tokens, longest)
        metrics = Metrics(metric_family)
        metrics.show_engine(folder, manifest)
        self._metrics = EncoderMetrics(metrics, args["model_name"], args["model_version"], rows)

    def execute(self, requests: list[Request]) -> list[Any]:
        with self._heartbeat:
            began_s = time.monotonic()
            self._metrics.began(len(requests))
            responses = self._execute(requests)
            self._metrics.ended(began_s)
            return responses

    def _execute(self, requests: list[Request]) -> list[Any]:
        draining = self._drain_file is not None and self._drain_file.exists()
        parsed = [self._parse(request, draining) for request in requests]
        accepted = [one for one in parsed if isinstance(one, EncoderRequest)]
        rows = [row for one in accepted for row in one.rows]
        try:
            made = self._forward.run(rows, self._metrics.passed) if rows else np.empty(0, np.float32)
        except Exception as exc:  # the outer edge: OpenVINO's own errors become the requests' errors
            failed = EngineFailed(f"the model failed: {exc!r}")
            parsed = [one if isinstance(one, TridentError) else failed for one in parsed]
        responses, first = [], 0
        for one in parsed:
            if isinstance(one, TridentError):
                self._metrics.refused(one)
                responses.append(error_response(one))
                continue
            responses.append(response(self._outputs(one, made[first : first + len(one.rows)])))
            first += len(one.rows)
        return responses

    def _parse(self, request: Request, draining: bool) -> EncoderRequest | TridentError:
        try:
            if draining:
                raise Unavailable("the server is shutting down")
            if request.is_cancelled():
                raise Cancelled("the client has left")
            return parse(Inputs(request), self._kind, self._encoder, self._tokens)
        except Exception as exc:  # the outer edge: one request's defect must not fail its batch
            return of_ours(exc, "the encoder could not read the request")

    def _outputs(self, request: EncoderRequest, made: np.ndarray) -> dict[str, np.ndarray]:
        """made: f32[rows, d] or f32[rows] of the request."""
        counts = np.asarray([len(row.ids) for row in request.rows], np.int32).reshape(-1, request.count).sum(axis=0)
        self._metrics.done(int(counts.sum()))
        outputs = {"num_input_tokens": counts[:, None].astype(np.int32)}
        if not request.scored:
            shorter = made[:, : request.dimensions]
            if self._encoder.normalize and request.dimensions < self._encoder.dimensions:
                shorter = _unit(shorter)
            return outputs | {"embedding": np.ascontiguousarray(shorter)}
        if made.ndim == 2:  # of an embedding model: the cosine
            queries, documents = _unit(made[: request.count]), _unit(made[request.count :])
            made = (queries * documents).sum(axis=1)
        return outputs | {"score": made.astype(np.float32)[:, None]}

    def finalize(self) -> None:
        self._heartbeat.close()


def _unit(vectors: np.ndarray) -> np.ndarray:
    lengths: np.ndarray = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(lengths, np.float32(1e-12))
