"""A replica that streams scripted tokens over true gRPC: Triton's protocols without Triton.

It speaks the KServe v2 service with the official protobufs, so what passes here passes as bytes on a wire.
It behaves like Triton 2.51 in front of our ensemble: ModelStreamInfer answers every request of a stream,
errors of a request ride in ``error_message``, the last response carries ``triton_final_response`` (on the
last token or on an empty extra response), the order of the outputs differs from one stream to the next,
a model called with ModelInfer although it is decoupled is refused, and ``engine`` honours ``stop``.

    python -m tests.fakes.replica --tokens 200 --gap-ms 5      # prints "grpc HOST:PORT metrics URL", serves
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from clients.wire import infer_response
from contract import packed_delta, tensors
from contract.errors import TridentError, to_text
from contract.generation import FinishReason

_STRUCT = {"INT32": "i", "INT64": "q", "UINT64": "Q", "FP32": "f", "BOOL": "?"}


@dataclass(frozen=True)
class Script:
    """What happens to one request.

    tokens: the text of each token; its id is its index. first_token_s, gap_s: pacing; 0 is flat out.
    tokens_per_response: how many tokens one response carries (coalescing).
    refuse: answered with ``error_message`` and no token. fail_after: after so many tokens the stream ends
    in band with ``error``. status_after: after so many tokens the RPC ends with ``status`` (code, details,
    trailers). stall_after: after so many tokens nothing comes any more until the caller leaves.
    gate, gate_at: after so many tokens it waits until the gate is opened.
    empty_final: whether the final flag rides on an extra response without outputs.
    sparse: finish_reason and the counts are present on the last response only.
    silent_end: the RPC ends with OK and without any final response. cached_tokens: of the prompt.
    """

    tokens: tuple[str, ...] = ()
    finish_reason: FinishReason = FinishReason.STOP
    stop_reason: str = ""
    first_token_s: float = 0.0
    gap_s: float = 0.0
    tokens_per_response: int = 1
    refuse: TridentError | str | None = None
    fail_after: int | None = None
    error: TridentError | None = None
    status_after: int | None = None
    status: tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]] = (grpc.StatusCode.UNAVAILABLE, "gone", ())
    stall_after: int | None = None
    gate: asyncio.Event | None = None
    gate_at: int = 0
    cached_tokens: int = 0
    empty_final: bool = False
    sparse: bool = False
    silent_end: bool = False


@dataclass(frozen=True)
class SeenRequest:
    """One request as it arrived. ``inputs`` are flat Python lists by tensor name, ``shapes`` as sent."""

    model: str
    id: str
    inputs: dict[str, list]
    shapes: dict[str, tuple[int, ...]]
    parameters: dict[str, Any]
    metadata: dict[str, Any]
    deadline_s: float | None

    def value(self, name: str) -> Any:
        """The one element of a scalar input, or None if it was not sent."""
        values = self.inputs.get(name)
        return values[0] if values else None


def echo(seen: SeenRequest) -> Script:
    """The default script: ``max_tokens`` tokens that name the prompt's words in turn."""
    words = str(seen.value("text_input") or seen.value("messages") or "").split() or ["token"]
    count = seen.value("max_tokens") or 16
    return Script(tuple(f" {words[n % len(words)]}" for n in range(count)), FinishReason.LENGTH)


@dataclass
class Counts:
    """What the replica has seen so far."""

    started: int = 0
    finished: int = 0
    cancelled: int = 0
    running: int = 0
    most_running: int = 0
    health_checks: int = 0
    stopped_ids: list[str] = field(default_factory=list)


class FakeReplica:
    """One replica on loopback. ``script`` maps a request to what happens to it; set ``ready`` to fail probes.

    Sequences beyond ``slots`` wait for a slot, as in an engine with a full batch. engine: the hash its page says.
    """

    def __init__(
        self,
        script: Callable[[SeenRequest], Script] = echo,
        *,
        model: str = "ensemble",
        slots: int = 10_000,
        seed: int = 0,
        engine: str = "",
        adapters: tuple[str, ...] = (),
        kv_usage: float | None = None,
        packed: bool = False,
    ) -> None:
        self.packed = packed  # it has the model ensemble_packed too
        self.kv_usage = kv_usage
        self.adapters = adapters
        self.script = script
        self.model = model
        self.engine = engine
        self.ready = True
        self.steps = 0  # what its page says of the engine's iterations; 0: nothing
        self.seen: list[SeenRequest] = []
        self.counts = Counts()
        self.url = ""
        self.metrics_url = ""
        self._slots = asyncio.Semaphore(slots)
        self._slot_count = slots
        self._stop_events: dict[str, asyncio.Event] = {}
        self._random = random.Random(seed)
        self._server: grpc.aio.Server | None = None
        self._metrics: asyncio.Server | None = None
        self._pages: dict[asyncio.Task, asyncio.StreamWriter] = {}

    async def start(
        self, host: str = "127.0.0.1", port: int = 0, tls: grpc.ServerCredentials | None = None
    ) -> FakeReplica:
        # gRPC drops a call that it could not hand over for half a minute, as on a machine where threads stand still.
        patience = ("grpc.server_max_unrequested_time_in_server", 600)
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0), patience])
        self._server.add_generic_rpc_handlers((_Service(self).handlers(),))
        address = f"{host}:{port}"
        bound = self._server.add_secure_port(address, tls) if tls else self._server.add_insecure_port(address)
        await self._server.start()
        self._metrics = await asyncio.start_server(self._answer_metrics, host, 0)
        self.url = f"{host}:{bound}"
        self.metrics_url = f"http://{host}:{self._metrics.sockets[0].getsockname()[1]}/metrics"
        return self

    async def stop(self, grace_s: float | None = None) -> None:
        """Ends at once (streams see UNAVAILABLE or CANCELLED), or after ``grace_s``."""
        if self._metrics:
            # A connection accepted just before is lost if the server closes at once (CPython 3.11: an assertion
            # when it attaches): accept no more, let the event loop hand over the accepted ones, and close then.
            asyncio.get_running_loop().remove_reader(self._metrics.sockets[0].fileno())
            for _ in range(3):
                await asyncio.sleep(0)
            self._metrics.close()
            self._metrics = None
        for page, writer in self._pages.items():
            page.cancel()
            writer.transport.abort()  # a page cancelled before its first step would not close it
        await asyncio.gather(*self._pages, return_exceptions=True)
        if self._server:
            await self._server.stop(grace_s)

    async def __aenter__(self) -> FakeReplica:
        return self if self._server else await self.start()

    async def __aexit__(self, *_exc: object) -> None:
        await self.stop()

    @property
    def models(self) -> tuple[str, ...]:
        return (self.model, "engine") + ((packed_delta.MODEL,) if self.packed else ())

    def metrics_page(self) -> str:
        """The Prometheus page with the families TensorRT-LLM's backend names."""
        running, waiting = min(self.counts.running, self._slot_count), max(0, self.counts.running - self._slot_count)
        request = {"active": self.counts.running, "max": self._slot_count, "scheduled": running, "waiting": waiting}
        batcher = {"generation_requests": running, "context_requests": 0, "total_context_tokens": 0}
        lines = ["# TYPE nv_trt_llm_request_metrics gauge"]
        lines += [
            f'nv_trt_llm_request_metrics{{model="engine",request_type="{k}",version="1"}} {v}'
            for k, v in request.items()
        ]
        if self.steps:
            lines += ["# TYPE nv_trt_llm_general_metrics gauge"]
            label = 'general_type="iteration_counter"'
            lines += [f'nv_trt_llm_general_metrics{{{label},model="engine",version="1"}} {self.steps}']
        if self.kv_usage is not None:
            lines += ["# TYPE nv_trt_llm_kv_cache_block_metrics gauge"]
            label = 'kv_cache_block_type="fraction"'
            lines += [f'nv_trt_llm_kv_cache_block_metrics{{{label},model="engine",version="1"}} {self.kv_usage}']
        lines += ["# TYPE nv_trt_llm_inflight_batcher_metrics gauge"]
        label = "inflight_batcher_specific_metric"
        lines += [
            f'nv_trt_llm_inflight_batcher_metrics{{{label}="{k}",model="engine",version="1"}} {v}'
            for k, v in batcher.items()
        ]
        if self.adapters:
            names = f'running_lora_adapters="{",".join(self.adapters)}",waiting_lora_adapters=""'
            lines += [f'vllm:lora_requests_info{{max_lora="{len(self.adapters)}",{names}}} 1.8e9']
        if self.packed:
            lines += [f"{packed_delta.METRIC} 1"]
        if self.engine:
            lines += [f'trident_engine_info{{engine="fake",manifest_sha256="{self.engine}"}} 1']
        return "\n".join(lines) + "\n"

    def _answer_metrics(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        page = asyncio.create_task(self._serve_metrics(reader, writer))
        self._pages[page] = writer
        page.add_done_callback(self._pages.pop)

    async def _serve_metrics(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            body = self.metrics_page().encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n")
            writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def generate(self, seen: SeenRequest, context: grpc.aio.ServicerContext, asked_empty_final: bool):
        """Yields serialized ModelStreamInferResponse messages as the script says."""
        script = self.script(seen)
        self.counts.started += 1
        self.counts.running += 1
        self.counts.most_running = max(self.counts.most_running, self.counts.running)
        stop = self._stop_events[seen.id] = asyncio.Event()
        try:
            async with self._slots:
                async for message in self._play(script, seen, context, stop, asked_empty_final):
                    yield message
            self.counts.finished += 1
        except (asyncio.CancelledError, GeneratorExit):
            self.counts.cancelled += 1
            raise
        finally:
            self.counts.running -= 1
            self._stop_events.pop(seen.id, None)

    async def _play(self, script, seen, context, stop, asked_empty_final):
        if script.refuse is not None:
            yield refusal(script.refuse, seen.id)
            return
        order = list(range(len(tensors.ENSEMBLE_OUTPUTS)))
        self._random.shuffle(order)
        end = len(script.tokens) if script.fail_after is None else script.fail_after
        whole = seen.value("stream") is False
        skipped = len(seen.inputs.get("continue_ids", ()))
        size = max(1, len(script.tokens)) if whole else script.tokens_per_response
        groups = list(_groups(script.tokens[skipped:end], size))
        sent, last_is_content = skipped, script.fail_after is None
        prompt_tokens = len(str(seen.value("text_input") or seen.value("messages") or "").split())

        def response(texts, reason, final):
            whole = content(seen.id, seen.model, sent, texts, reason, script, order, prompt_tokens, final)
            return packed(whole) if seen.model == packed_delta.MODEL else whole

        for n, texts in enumerate(groups):
            await _pause(script.first_token_s if n == 0 else script.gap_s, stop)
            if script.status_after is not None and sent >= script.status_after:
                break
            if script.stall_after is not None and sent >= script.stall_after:
                await stop.wait()
            if script.gate is not None and sent + len(texts) > script.gate_at:
                await script.gate.wait()
            if stop.is_set():
                yield response((), FinishReason.CANCELLED, True)
                return
            last = last_is_content and n == len(groups) - 1
            rides = last and not (script.empty_final and asked_empty_final)
            yield response(texts, script.finish_reason if last else None, rides and not script.silent_end)
            sent += len(texts)
        if script.status_after is not None:
            code, details, trailers = script.status
            await context.abort(code, details, trailers)
        if script.stall_after is not None and sent >= script.stall_after:
            await stop.wait()
            yield response((), FinishReason.CANCELLED, True)
        elif script.fail_after is not None:
            yield response((), FinishReason.ERROR, True)
        elif not script.silent_end and (not groups or (script.empty_final and asked_empty_final)):
            yield final_only(seen.id, seen.model)

    def stop_request(self, request_id: str) -> None:
        """What the engine's ``stop`` does: a running id ends, an unknown one is a silent no-op."""
        self.counts.stopped_ids.append(request_id)
        if request_id in self._stop_events:
            self._stop_events[request_id].set()


class _Service(service_pb2_grpc.GRPCInferenceServiceServicer):
    """The KServe service over one FakeReplica; streaming answers leave as bytes, built with the protobufs."""

    def __init__(self, replica: FakeReplica) -> None:
        self._replica = replica

    def handlers(self) -> grpc.GenericRpcHandler:
        pb, unary = service_pb2, grpc.unary_unary_rpc_method_handler
        methods = {
            name: unary(getattr(self, name), getattr(pb, f"{name}Request").FromString, _to_bytes)
            for name in ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelConfig")
            + ("RepositoryIndex",)
        }
        methods["ModelInfer"] = unary(self.ModelInfer, pb.ModelInferRequest.FromString, _to_bytes)
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self.ModelStreamInfer, pb.ModelInferRequest.FromString, None
        )
        return grpc.method_handlers_generic_handler("inference.GRPCInferenceService", methods)

    async def ServerLive(self, request, context):
        return service_pb2.ServerLiveResponse(live=True)

    async def ServerReady(self, request, context):
        self._replica.counts.health_checks += 1
        return service_pb2.ServerReadyResponse(ready=self._replica.ready)

    async def ModelReady(self, request, context):
        self._replica.counts.health_checks += 1
        known = request.name in self._replica.models
        return service_pb2.ModelReadyResponse(ready=known and self._replica.ready)

    async def ServerMetadata(self, request, context):
        return service_pb2.ServerMetadataResponse(name="triton", version="2.51.0", extensions=["model_repository"])

    async def ModelMetadata(self, request, context):
        await self._known(request.name, context)
        answer = service_pb2.ModelMetadataResponse(name=request.name, versions=["1"], platform="ensemble")
        for tensor in tensors.ENSEMBLE_INPUTS:
            answer.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=[-1, *tensor.dims])
        for tensor in tensors.ENSEMBLE_OUTPUTS:
            answer.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=[-1, *tensor.dims])
        return answer

    async def ModelConfig(self, request, context):
        await self._known(request.name, context)
        config = model_config_pb2.ModelConfig(name=request.name, platform="ensemble", max_batch_size=1)
        config.model_transaction_policy.decoupled = True
        return service_pb2.ModelConfigResponse(config=config)

    async def RepositoryIndex(self, request, context):
        answer = service_pb2.RepositoryIndexResponse()
        for name in self._replica.models:
            answer.models.add(name=name, version="1", state="READY" if self._replica.ready else "UNAVAILABLE")
        return answer

    async def ModelInfer(self, request, context):
        message = f"ModelInfer RPC doesn't support models with decoupled transaction policy: {request.model_name}"
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, message)

    async def ModelStreamInfer(self, requests, context):
        async for request in requests:
            seen = _seen(request, context)
            self._replica.seen.append(seen)
            if seen.model == "engine" and seen.value("stop"):
                self._replica.stop_request(seen.id)
                yield final_only(seen.id, "engine")
            elif seen.model == "engine" or seen.model not in self._replica.models:
                yield refusal(f"Request for unknown model: '{seen.model}' is not found", seen.id)
            else:
                asked = bool(seen.parameters.get("triton_enable_empty_final_response"))
                async for message in self._replica.generate(seen, context, asked):
                    yield message

    async def _known(self, name: str, context: grpc.aio.ServicerContext) -> None:
        if name not in self._replica.models:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{name}' is not found")


def refusal(error: TridentError | str, request_id: str) -> bytes:
    """A response with ``error_message``, worded as Triton does for an error of the ensemble's first step."""
    text = f"in ensemble 'ensemble', {to_text(error)}" if isinstance(error, TridentError) else error
    answer = service_pb2.ModelStreamInferResponse(error_message=text)
    answer.infer_response.id = request_id
    answer.infer_response.parameters["triton_final_response"].bool_param = True
    return answer.SerializeToString()


def packed(data: bytes) -> bytes:
    """The response of the ensemble as the packed ensemble sends it."""
    delta, _, _ = infer_response.ResponseDecoder().decode(data)
    assert delta is not None
    answer, raw = service_pb2.ModelStreamInferResponse.FromString(data), packed_delta.pack(delta)
    del answer.infer_response.outputs[:], answer.infer_response.raw_output_contents[:]
    answer.infer_response.outputs.add(name=packed_delta.OUTPUT, datatype="UINT8", shape=[1, len(raw)])
    answer.infer_response.raw_output_contents.append(raw)
    return answer.SerializeToString()


def final_only(request_id: str, model: str) -> bytes:
    """The empty extra response that only says: this was all."""
    answer = service_pb2.ModelStreamInferResponse()
    inner = answer.infer_response
    inner.model_name, inner.model_version, inner.id = model, "1", request_id
    inner.parameters["triton_final_response"].bool_param = True
    return answer.SerializeToString()


def content(request_id, model, sent, texts, reason, script, order, prompt_tokens, final) -> bytes:
    """One response with outputs: ``texts`` are the tokens it adds after ``sent`` earlier ones."""
    ended = reason is not None
    error = to_text(script.error) if reason is FinishReason.ERROR and script.error else ""
    values: dict[str, Any] = {
        "text_output": "".join(texts),
        "output_ids": list(range(sent, sent + len(texts))),
        "cum_log_probs": [-0.5 * (sent + len(texts))],
        "output_log_probs": [-0.5] * len(texts),
        "finish_reason": reason.value if reason else "",
        "stop_reason": script.stop_reason if ended else "",
        "error_message": error,
        "num_input_tokens": [prompt_tokens],
        "num_output_tokens": [sent + len(texts)],
        "num_cached_tokens": [script.cached_tokens],
        "arrival_time_ns": [1_000],
        "first_scheduled_time_ns": [2_000],
        "first_token_time_ns": [3_000],
        "last_token_time_ns": [3_000 + sent],
        "stage_time_ns": [1_500, 4_000 + sent, 5_000 + sent],
    }
    if script.sparse and not ended:
        values = {name: values[name] for name in ("text_output", "output_ids")}
    answer = service_pb2.ModelStreamInferResponse()
    inner = answer.infer_response
    inner.model_name, inner.model_version, inner.id = model, "1", request_id
    inner.parameters["triton_final_response"].bool_param = final
    inner.parameters["sequence_id"].int64_param = 0
    inner.parameters["sequence_start"].bool_param = False
    inner.parameters["sequence_end"].bool_param = False
    for index in order:
        tensor = tensors.ENSEMBLE_OUTPUTS[index]
        if tensor.name not in values:
            continue
        value = values[tensor.name]
        count = 1 if isinstance(value, str) else len(value)
        shape = [1, 1, count] if len(tensor.dims) == 2 else [1, count]
        inner.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
        inner.raw_output_contents.append(_raw(tensor.datatype, value))
    return answer.SerializeToString()


def _raw(datatype: str, value: Any) -> bytes:
    if datatype == "BYTES":
        data = value.encode()
        return struct.pack("<I", len(data)) + data
    return struct.pack(f"<{len(value)}{_STRUCT[datatype]}", *value)


def _seen(request: service_pb2.ModelInferRequest, context: grpc.aio.ServicerContext) -> SeenRequest:
    inputs, shapes = {}, {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        inputs[tensor.name] = list(_elements(tensor.datatype, raw))
        shapes[tensor.name] = tuple(tensor.shape)
    parameters = {
        key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in request.parameters.items()
    }
    metadata = {key: value for key, value in context.invocation_metadata() or ()}
    return SeenRequest(request.model_name, request.id, inputs, shapes, parameters, metadata, context.time_remaining())


def _elements(datatype: str, raw: bytes) -> Iterator[Any]:
    if datatype != "BYTES":
        form = f"<{_STRUCT[datatype]}"
        yield from (value for (value,) in struct.iter_unpack(form, raw))
        return
    at = 0
    while at < len(raw):
        (size,) = struct.unpack_from("<I", raw, at)
        yield raw[at + 4 : at + 4 + size].decode()
        at += 4 + size


def _groups(tokens: tuple[str, ...], size: int) -> Iterator[tuple[str, ...]]:
    for at in range(0, len(tokens), size):
        yield tokens[at : at + size]


def _to_bytes(message: Any) -> bytes:
    return message.SerializeToString()


async def _pause(seconds: float, stop: asyncio.Event) -> None:
    if seconds > 0:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), seconds)


@contextlib.contextmanager
def replica_in_thread(script: Callable[[SeenRequest], Script] = echo, **options: Any) -> Iterator[FakeReplica]:
    """A replica on its own event loop in its own thread, for callers that block."""
    started, loop = threading.Event(), asyncio.new_event_loop()
    replica = FakeReplica(script, **options)

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(replica.start())
        started.set()
        loop.run_forever()
        loop.run_until_complete(replica.stop())
        loop.close()

    thread = threading.Thread(target=run, name="fake-replica", daemon=True)
    thread.start()
    if not started.wait(60):
        raise RuntimeError("the fake replica did not start within 60 s")
    try:
        yield replica
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)


def main() -> None:
    """A scripted replica as a process of its own; prints where it listens, serves until killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fakes.replica", description=main.__doc__)
    parser.add_argument("--port", type=int, default=0, help="gRPC port on loopback; 0 picks a free one")
    parser.add_argument("--tokens", type=int, help="tokens per request; left out: what max_tokens asks for")
    parser.add_argument("--gap-ms", type=float, default=0.0, help="time between responses")
    parser.add_argument("--first-token-ms", type=float, default=0.0, help="time before the first response")
    parser.add_argument("--tokens-per-response", type=int, default=1)
    parser.add_argument("--slots", type=int, default=10_000, help="sequences that run at once; others wait")
    parser.add_argument("--full", action="store_true", help="every output on every response, not only on the last")
    args = parser.parse_args()

    def script(seen: SeenRequest) -> Script:
        tokens = echo(seen).tokens
        if args.tokens:
            tokens = tuple(f" {n % 97}" for n in range(args.tokens))
        pace = (args.first_token_ms / 1e3, args.gap_ms / 1e3)
        return Script(tokens, FinishReason.LENGTH, "", *pace, args.tokens_per_response, sparse=not args.full)

    async def serve() -> None:
        replica = await FakeReplica(script, slots=args.slots).start(port=args.port)
        print(f"grpc {replica.url} metrics {replica.metrics_url}", flush=True)
        await asyncio.Event().wait()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())
    sys.exit(0)


if __name__ == "__main__":
    main()
