"""Serve Triton's own gRPC protocol (KServe v2) with admission and routing, for unchanged Triton clients.

Requests and responses of ModelStreamInfer go through as the bytes they are; what admission needs is read from the
tensors. A rejected request (budget, overload, credentials, deadline) ends the RPC with that status while no other
request runs on the stream. Otherwise, and for an invalid request, the error is sent in ``error_message`` as Triton
sends it, unless the client sent the metadata ``triton_grpc_error: true``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import struct
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from tritonclient.grpc.service_pb2 import (
    ModelInferRequest,
    ModelReadyRequest,
    ModelStreamInferResponse,
    RepositoryIndexRequest,
    RepositoryIndexResponse,
)

from clients.wire.connection import new_request_id
from clients.wire.request import MAX_REQUEST_ID, can_travel
from clients.wire.status import UnaryCall
from clients.wire.token_stream import NO_OUTPUTS
from contract import encoder, errors, packed_delta, priority
from contract.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InvalidArgument,
    Overloaded,
    TridentError,
    Unavailable,
)
from contract.generation import FinishReason, GenerationRequest, Guide, TokenDelta, changed
from gateway.api import error_responses
from gateway.api.error_responses import for_caller
from gateway.api.grpc_endpoint import GrpcEndpoint
from gateway.api.response_writer import ResponseWriter
from gateway.choices import ChoiceDelta
from gateway.config.tenant import Tenant
from gateway.generation import Generation
from gateway.hooks.hooks import RequestHooks
from gateway.models import ServedModel
from gateway.request_context import RequestContext
from gateway.routing.backend_errors import from_backend
from gateway.routing.replicas import RoutedReplica
from gateway.service import Service

_LOG = logging.getLogger(__name__)
_SERVICE = "inference.GRPCInferenceService"
DEFAULT_MAX_TOKENS = 128  # the tokenizer model's default
MAX_REQUESTS_PER_STREAM = 256  # in flight at once; the stream is not read further until one ends
COUNTS = frozenset({"output_ids", "finish_reason", "error_message", "num_input_tokens", "num_output_tokens"})
TIMINGS = frozenset({"arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns"})
SHOW_TEXT = frozenset({"output_ids", "top_log_probs_ids"})  # as text_output does, in another form
_CHANGEABLE = frozenset({"text_input", "messages", "max_tokens"})
_CONTENTS = {"INT32": "int_contents", "BOOL": "bool_contents", "BYTES": "bytes_contents"}
_VERSIONS = ("", "1")  # of every model of a replica; none: any
_REQUEST = GenerationRequest()
_REJECTIONS = (Overloaded, Unavailable, errors.Unauthenticated, errors.PermissionDenied, DeadlineExceeded)


class KServeEndpoint(GrpcEndpoint):
    """Serve the KServe v2 gRPC methods."""

    port_setting = "grpc_port"

    def _handlers(self) -> list[grpc.GenericRpcHandler]:
        unary = grpc.unary_unary_rpc_method_handler
        methods = {
            "ServerLive": unary(self._server_live),
            "ServerReady": unary(self._server_ready),
            "ModelReady": unary(self._model_ready),
            "RepositoryIndex": unary(self._repository_index),
            "ModelInfer": unary(self._model_infer),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self._stream),
        }
        for name in ("ServerMetadata", "ModelMetadata", "ModelConfig"):
            methods[name] = unary(self._forwarded(f"/{_SERVICE}/{name}"))
        return [grpc.method_handlers_generic_handler(_SERVICE, methods)]

    async def _server_live(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return _flag(True)

    async def _server_ready(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return _flag(self._service.ready())

    async def _model_ready(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        name, version = _model_of(request)
        try:
            packed, model = _is_packed(name), self._service.models.find(name, Tenant())  # no key
        except errors.NotFound:
            return _flag(False)
        ready = self._service.ready() and version in _VERSIONS
        ready = ready and (not model.pool or self._service.replicas.serves(model.pool))
        return _flag(ready and (not packed or bool(self._replicas(model, packed))))

    async def _repository_index(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Return the models that the caller may use; only the ready ones if it asks so, as Triton does."""
        try:
            tenant = await self._service.tenant(_carrier(context))
            ready_only = RepositoryIndexRequest.FromString(request).ready
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the message is not a RepositoryIndexRequest")
            raise
        except TridentError as error:
            await context.abort(*error_responses.grpc_status(error))
            raise
        index = RepositoryIndexResponse()
        for model in self._service.models.of(tenant):
            if self._replicas(model, packed=False):
                index.models.add(name=model.name, version="1", state="READY")
            elif not ready_only:
                index.models.add(name=model.name, version="1", state="UNAVAILABLE", reason="no replica is ready")
        payload: bytes = index.SerializeToString()
        return payload

    def _replicas(self, model: ServedModel, packed: bool) -> list[RoutedReplica]:
        """Return the ready replicas of a model. packed: those that have the packed ensemble."""
        pools, found = self._service.models.pools.get(model.pool), self._service.replicas.ready()
        found = [replica for replica in found if replica.metrics.packed or not packed]
        return found if pools is None else [replica for replica in found if replica.pool in pools]

    async def _model_infer(self, request: bytes, context: grpc.aio.ServicerContext) -> NoReturn:
        """Reject ModelInfer as Triton does for an ensemble with a decoupled step."""
        message = "ModelInfer RPC doesn't support models with decoupled transaction policy; use ModelStreamInfer"
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, message)
        raise AssertionError("abort raises")

    def _forwarded(self, method: str) -> Callable:
        """Return the handler of a method that any healthy replica can serve."""

        async def handle(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
            try:
                tenant = await self._service.tenant(_carrier(context))
                replicas = self._service.replicas.ready()
                if not method.endswith("ServerMetadata"):
                    name, version = _model_of(request)
                    packed = _is_packed(name)
                    replicas = self._replicas(self._service.models.find(name, tenant), packed)
                    served = packed_delta.MODEL if packed else self._service.settings.triton_model
                    if replicas and replicas[0].pool in self._service.replicas.encoders:
                        served = encoder.MODEL
                    request = ModelReadyRequest(name=served, version=version).SerializeToString()
                error: TridentError = Unavailable("no replica is ready", 1.0)
                for replica in replicas:
                    try:
                        call = UnaryCall(method, request)
                        return await replica.channel.call(call, self._service.settings.probe_timeout_s)
                    except TridentError as exc:
                        _LOG.warning("replica %s did not answer %s: %s", replica.url, method.rpartition("/")[2], exc)
                        error = from_backend(exc)
                        if not isinstance(exc, Unavailable | DeadlineExceeded):
                            break
                raise error
            except TridentError as error:
                await context.abort(*error_responses.grpc_status(error))
                raise

        return handle

    async def _stream(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        await _Stream(self._service, context).run(requests)


class _Stream:
    """One ModelStreamInfer. Made by the task that handles it."""

    def __init__(self, service: Service, context: grpc.aio.ServicerContext) -> None:
        self._service, self._context, self._carrier = service, context, _carrier(context)
        self._writer = ResponseWriter(context, service.settings.stall_timeout_s)
        self._handler = asyncio.current_task()
        self._tasks: set[asyncio.Task] = set()
        self._rejected: list[TridentError] = []

    async def run(self, requests: AsyncIterator[bytes]) -> None:
        """Serve the requests until all have ended, or one ends the RPC."""
        service, context, writer, tasks = self._service, self._context, self._writer, self._tasks
        try:
            await service.tenant(self._carrier)
        except TridentError as error:  # who has no key must not hold a stream open without a request
            with contextlib.suppress(asyncio.TimeoutError, StopAsyncIteration):
                await asyncio.wait_for(anext(aiter(requests)), service.settings.header_timeout_s)
            service.metrics.requests.labels("grpc", "text_completion", error.grpc_status).inc()
            await context.abort(*error_responses.grpc_status(error))
        last_ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        last_read = False

        def ended(task: asyncio.Task) -> None:
            tasks.discard(task)
            if last_read and not tasks and not last_ended.done():
                last_ended.set_result(None)

        service.watchdog.add(writer)
        try:
            async for data in requests:
                try:
                    request = ModelInferRequest.FromString(data)
                except DecodeError:
                    self._rejected.append(InvalidArgument("", "the message is not a ModelInferRequest"))
                    break
                if len(tasks) >= MAX_REQUESTS_PER_STREAM:
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                task = asyncio.ensure_future(self._serve(request, len(data)))
                tasks.add(task)
                task.add_done_callback(ended)
            last_read = True
            if tasks:
                await last_ended  # one future; asyncio.wait makes several objects a request
        except asyncio.CancelledError:
            if writer.stalled:
                self._rejected.append(Cancelled(f"the client read nothing for {writer.timeout_s:g} s"))
            elif not self._rejected:
                raise
        finally:
            service.watchdog.discard(writer)
            for task in tuple(tasks):
                task.cancel()
            if tasks:
                await asyncio.gather(*tasks, return_exceptions=True)
        if self._rejected:
            await context.abort(*error_responses.grpc_status(self._rejected[0]))

    async def _serve(self, request: ModelInferRequest, size: int) -> None:
        """Serve one request of ``size`` bytes, and send its error."""
        code = "CANCELLED"
        try:
            error = await self._generate(request, size)
            code = error.grpc_status if error else "OK"
        except TridentError as error:
            code = error.grpc_status
            if _wants_status(error, self._carrier) and len(self._tasks) == 1:
                self._rejected.append(error)
                if self._handler is not None:
                    self._handler.cancel()  # it may be waiting for another request
            elif not self._context.done():
                await self._writer.write(_in_band(error, request.id))
        finally:
            self._service.metrics.requests.labels("grpc", "text_completion", code).inc()

    async def _generate(self, request: ModelInferRequest, size: int) -> TridentError | None:
        """Return the error that was sent in band; raise one that was not."""
        service = self._service
        try:
            tenant = await service.tenant(self._carrier)
            with service.bodies.lease(tenant.name, alone=service.configuration.keyless) as lease:
                try:
                    lease.take(size)
                except Overloaded as error:
                    service.metrics.rejected(error)
                    raise
                return await self._admit(request, tenant)
        except TridentError:
            raise
        except Exception as exc:
            raise _unexpected(self._context, _quoted(request, self._carrier)) from exc

    async def _admit(self, request: ModelInferRequest, tenant: Tenant) -> TridentError | None:
        service = self._service
        sent = read(request, _remaining_s(request, self._context, service.settings.request_timeout_s))
        request.model_name = named(request.model_name, sent.adapter)
        quoted, session = _quoted(request, self._carrier), self._carrier.get("x-session-id", "")[:MAX_REQUEST_ID]
        own = take_priority(request)
        context = RequestContext(tenant, "grpc", "text_completion", quoted, self._carrier, session, own)
        with service.hooks.call(context) as hooks:
            if hooks is not None:
                (changed,) = await hooks.changed((sent,), request.model_name, "", _CHANGEABLE)
                sent = _changed(request, sent, changed)
            if _is_packed(request.model_name):
                others = [output.name for output in request.outputs if output.name != packed_delta.OUTPUT]
                if others:
                    raise InvalidArgument("outputs", f"must be {packed_delta.OUTPUT} alone, got {others[0]!r:.100}")
                del request.outputs[:]  # a replica without that one has others
            context = await service.routed(request.model_name, (sent,), context)
            if hooks is not None:
                hooks.call.model = context.model.name
            if adapter := context.model.adapter:
                sent = replace(sent, adapter=adapter)
            error = await self._generated(request, sent, context, hooks)
            if hooks is not None:
                hooks.error = error
            return error

    async def _generated(
        self, request: ModelInferRequest, sent: GenerationRequest, context: RequestContext, hooks: RequestHooks | None
    ) -> TridentError | None:
        """Generate what hooks made of a request; see ``_generate``. sent: what was read of it."""
        service, writer, packed = self._service, self._writer, _is_packed(request.model_name)
        choices = await service.choices((sent,), context)
        (generation,) = choices.generations
        error: BaseException | None = None
        try:
            await writer.send_metadata(choices.headers)
            if generation.request.max_tokens != sent.max_tokens:
                set_max_tokens(request, generation.request.max_tokens)
            hidden = _also(request, COUNTS)  # usage and finish reason
            if service.tracing.on:
                hidden |= request_timings(request)
            if hooks is not None and hooks.filters:
                hidden |= SHOW_TEXT
            request.model_name = service.settings.triton_model
            if sent.adapter:
                _put(request, "lora_name", "BYTES", (sent.adapter.encode(),))
            generation.relay(request.SerializeToString(), partial(continued, request), packed)
            error = await self._relay(generation, hidden, packed, context, hooks)
            writer.set_trailers(choices.headers)
            return error
        except asyncio.CancelledError as exc:
            error = exc
            raise
        except TridentError as exc:
            error = exc
            raise for_caller(exc, context.request_id) from exc
        except Exception as exc:
            error = _unexpected(self._context, context.request_id)
            raise error from exc
        finally:
            generation.close(error)

    async def _relay(
        self,
        generation: Generation,
        hidden: frozenset[str],
        packed: bool,
        context: RequestContext,
        hooks: RequestHooks | None,
    ) -> TridentError | None:
        """Relay messages as they come, without hidden outputs. Return the error that a relayed message carried.

        packed: for the packed ensemble. What a message must not show is packed again, and all of a replica without it.
        """
        relayed: TridentError | None = None
        writer = self._writer
        try:
            async for delta in generation:
                data = generation.message
                changes: dict[str, Any] = {}  # not dict[str, Any](), which takes 0.7 µs
                if delta.usage is not None and not self._service.reports_cached_tokens:
                    changes["usage"] = replace(delta.usage, cached_tokens=0)
                    data = with_output(data, "num_cached_tokens", lambda raw: bytes(len(raw)))
                deferred = generation.deferred_error
                if deferred is not None:  # it came behind text in this message
                    shown = for_caller(from_backend(deferred), context.request_id)
                    changes |= {"finish_reason": FinishReason.ERROR, "error": errors.to_text(shown)}
                    data = with_error(data, shown)
                    relayed = None if "error_message" in hidden else deferred
                if hooks is not None and delta is not NO_OUTPUTS:
                    changes["text"] = (await hooks.output(ChoiceDelta(0, delta))).delta.text
                    text = _raw("BYTES", changes["text"].encode())
                    data = with_output(data, "text_output", lambda raw, text=text: text)  # type: ignore[misc]
                if hidden and delta is not NO_OUTPUTS:
                    changes |= {"token_ids": (), "top_log_probs": ()} if hidden >= SHOW_TEXT else {}
                    data = without_outputs(data, hidden)
                if packed and delta is not NO_OUTPUTS and (changes or not generation.sent_packed):
                    data = with_packed(data, replace(delta, **changes))
                await writer.write(data)
        except TridentError as error:
            if error is relayed:
                return error
            carrier = b"" if hidden or packed else generation.message
            if not carrier or _wants_status(error, context.carrier):
                raise
            shown = for_caller(error, context.request_id)
            with contextlib.suppress(asyncio.CancelledError):  # the client may leave as soon as it has this
                await writer.write(carrier if shown is error else with_error(carrier, shown))
            return error
        except asyncio.CancelledError:
            if relayed is None and not generation.finish_reason:
                raise  # otherwise the last message is sent or on its way, and the request is done
            return relayed
        return None


def read(request: ModelInferRequest, timeout_s: float) -> GenerationRequest:
    """Return what admission and routing need of a request; the ensemble checks the rest. Raises: InvalidArgument."""
    for output in request.outputs:
        if output.parameters:  # tritonserver 2.51 crashes when it classifies a streamed text
            raise InvalidArgument(output.name, f"must have no parameters, got {min(output.parameters)!r:.100}")
    names: dict[str, int] = {}
    for index, tensor in enumerate(request.inputs):
        names.setdefault(tensor.name, index)
        if "shared_memory_region" in tensor.parameters:
            raise InvalidArgument(tensor.name, "must be sent inline, got shared memory, which the gateway cannot read")
    prompt, messages = _texts(request, "text_input", names), _texts(request, "messages", names)
    turns = chat(messages) if messages is not None and prompt is None else None
    check_adapter_number(_nonzero(request, "lora_task_id", names))
    max_tokens, guide = _integer(request, "max_tokens", names), _texts(request, "guided_decoding_guide_type", names)
    return changed(
        _REQUEST,
        text_input=prompt if turns is None else None,
        messages=turns,
        tools=_texts(request, "tools", names) if turns is not None else None,
        input_ids=_integers(request, "input_ids", names) if turns is None and prompt is None else None,
        truncate_prompt_tokens=_integer(request, "truncate_prompt_tokens", names),
        continue_ids=_integers(request, "continue_ids", names) or (),
        adapter=_texts(request, "lora_name", names) or "",
        echo=_nonzero(request, "exclude_input_in_output", names) is False,
        max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max(1, max_tokens),
        timeout_s=timeout_s,
        request_id=_quotable(request.id),
        guide=Guide(guide, _texts(request, "guided_decoding_guide", names) or "") if guide else None,
    )


def chat(messages: str) -> tuple[dict[str, Any], ...]:
    """Return the messages in a tensor's JSON. Malformed JSON counts by its size only."""
    with contextlib.suppress(ValueError, RecursionError):
        turns = json.loads(messages)
        if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
            return tuple(turns)
    return ({"role": "user", "content": messages},)


def take_priority(request: ModelInferRequest) -> float:
    """Remove the client's ``request_priority`` and return it: the gateway sets another. Raises: InvalidArgument."""
    given: dict[str, object] = {}
    if priority.PARAMETER in request.parameters:
        parameter = request.parameters.pop(priority.PARAMETER)
        given[priority.PARAMETER] = getattr(parameter, parameter.WhichOneof("parameter_choice") or "", None)
    return priority.read(given)


def _changed(request: ModelInferRequest, before: GenerationRequest, after: GenerationRequest) -> GenerationRequest:
    """Write into a request what hooks changed, and return ``after``."""
    if after.text_input != before.text_input and after.text_input is not None:
        _put(request, "text_input", "BYTES", (after.text_input.encode(),))
    if after.messages != before.messages and after.messages is not None:
        _put(request, "messages", "BYTES", (json.dumps(after.messages).encode(),))
    if after.max_tokens != before.max_tokens:
        set_max_tokens(request, after.max_tokens)
    return after


def set_max_tokens(request: ModelInferRequest, max_tokens: int) -> None:
    """Overwrite the request's ``max_tokens``."""
    _put(request, "max_tokens", "INT32", (max_tokens,))


def continued(request: ModelInferRequest, ids: tuple[int, ...]) -> bytes:
    """Return the serialised request that goes on behind ``ids``."""
    request = ModelInferRequest.FromString(request.SerializeToString())
    _put(request, "continue_ids", "INT32", ids)
    if ids:  # those of an echoed prompt were relayed
        _put(request, "return_prompt_log_probs", "BOOL", ())
    return request.SerializeToString()


def check_adapter_number(number: object) -> None:
    """Raise InvalidArgument for a ``lora_task_id`` other than 0: the gateway knows adapters by their names."""
    if number:
        problem = "must be 0 or left out: name the adapter by lora_name, or in the model, MODEL:ADAPTER"
        raise InvalidArgument("lora_task_id", problem)


def named(model: str, adapter: str) -> str:
    """Return a model's name with the adapter of ``lora_name``: access and price go by it. Raises: InvalidArgument."""
    if adapter and ":" in model:
        raise InvalidArgument("lora_name", "must be left out beside a model with an adapter in its name")
    return f"{model}:{adapter}" if adapter else model


def request_timings(request: ModelInferRequest) -> frozenset[str]:
    """Request the engine's timings, for the spans. Returns the outputs that the client did not request."""
    if _content(request, "return_perf_metrics") is None:
        _put(request, "return_perf_metrics", "BOOL", (True,))
    return _also(request, TIMINGS)


def _also(request: ModelInferRequest, names: frozenset[str]) -> frozenset[str]:
    """Add outputs to a request that lists its outputs. Return the added names."""
    if not request.outputs:
        return frozenset()
    added = names - {output.name for output in request.outputs}
    for name in sorted(added):
        request.outputs.add(name=name)
    return added


def _put(request: ModelInferRequest, name: str, datatype: str, values: Sequence[int | bytes]) -> None:
    """Set an input of shape [1, n], as raw or inline content like the others; without values, remove it."""
    found = _content(request, name)
    if found is not None:
        del request.inputs[found[0]]
        if found[1] is not None:
            del request.raw_input_contents[found[0]]
    if not values:
        return
    inline = bool(request.inputs) and not request.raw_input_contents
    tensor = request.inputs.add(name=name, datatype=datatype, shape=[1, len(values)])
    if inline:
        getattr(tensor.contents, _CONTENTS[datatype]).extend(values)
    else:
        request.raw_input_contents.append(b"".join(_raw(datatype, value) for value in values))


def _raw(datatype: str, value: int | bytes) -> bytes:
    """Return the raw content of one element."""
    if isinstance(value, bytes):
        return struct.pack("<I", len(value)) + value
    return struct.pack("<?" if datatype == "BOOL" else "<i", value)


def without_outputs(data: bytes, names: Collection[str]) -> bytes:
    """Return a serialised response without the outputs ``names``."""
    message = ModelStreamInferResponse.FromString(data)
    response = message.infer_response
    raw = len(response.raw_output_contents) == len(response.outputs)
    for index in reversed([index for index, tensor in enumerate(response.outputs) if tensor.name in names]):
        del response.outputs[index]
        if raw:
            del response.raw_output_contents[index]
    return message.SerializeToString()


def with_packed(data: bytes, delta: TokenDelta) -> bytes:
    """Return a serialised response with ``delta``, packed, as its only output."""
    message, raw = ModelStreamInferResponse.FromString(data), packed_delta.pack(delta)
    response = message.infer_response
    del response.outputs[:], response.raw_output_contents[:]
    response.outputs.add(name=packed_delta.OUTPUT, datatype="UINT8", shape=[1, len(raw)])
    response.raw_output_contents.append(raw)
    return message.SerializeToString()


def with_error(data: bytes, error: TridentError) -> bytes:
    """Return a serialised response with ``error`` in ``error_message`` or in the output of that name."""
    message, text = ModelStreamInferResponse.FromString(data), errors.to_text(error)
    if message.error_message:
        message.error_message = text
    return with_output(message.SerializeToString(), "error_message", lambda raw: _raw("BYTES", text.encode()))


def with_output(data: bytes, name: str, change: Callable[[bytes], bytes]) -> bytes:
    """Return a serialised response with what ``change`` makes of an output's content, if it has that output."""
    message = ModelStreamInferResponse.FromString(data)
    contents = message.infer_response.raw_output_contents
    for index, tensor in enumerate(message.infer_response.outputs):
        if tensor.name == name:
            contents[index] = change(contents[index])
    return message.SerializeToString()


def _content(
    request: ModelInferRequest, name: str, names: Mapping[str, int] | None = None
) -> tuple[int, bytes | None] | None:
    """Return an input's index and raw content (None: inline); None if it was not sent. names: indices where known."""
    if names is None:
        names = {tensor.name: index for index, tensor in enumerate(request.inputs)}
    index = names.get(name)
    if index is None:
        return None
    contents = request.raw_input_contents
    if not contents:
        return index, None
    if index >= len(contents):
        raise InvalidArgument(name, "must have an entry in raw_input_contents, got none")
    return index, contents[index]


def _nonzero(request: ModelInferRequest, name: str, names: Mapping[str, int]) -> bool | None:
    """Return whether an input is other than 0; None if it was not sent."""
    if (found := _content(request, name, names)) is None:
        return None
    index, raw = found
    contents = request.inputs[index].contents
    return any((*contents.bool_contents, *contents.uint64_contents) if raw is None else raw)


def _texts(request: ModelInferRequest, name: str, names: Mapping[str, int]) -> str | None:
    if (found := _content(request, name, names)) is None:
        return None
    index, raw = found
    if raw is None:
        parts = request.inputs[index].contents.bytes_contents
        data = parts[0] if parts else b""
    else:
        if len(raw) < 4 or len(raw) != 4 + struct.unpack_from("<I", raw)[0]:
            raise InvalidArgument(name, "must be one BYTES element: its length in four bytes, then UTF-8")
        data = raw[4:]
    try:
        return data.decode()
    except UnicodeDecodeError as exc:
        raise InvalidArgument(name, f"must be UTF-8, got an invalid byte at {exc.start}") from exc


def _integer(request: ModelInferRequest, name: str, names: Mapping[str, int]) -> int | None:
    values = _integers(request, name, names)
    if values is not None and len(values) != 1:
        raise InvalidArgument(name, "must be one INT32 of shape [1, 1]")
    return values[0] if values else None


def _integers(request: ModelInferRequest, name: str, names: Mapping[str, int]) -> tuple[int, ...] | None:
    if (found := _content(request, name, names)) is None:
        return None
    index, raw = found
    if request.inputs[index].datatype != "INT32" or (raw is not None and len(raw) % 4):
        raise InvalidArgument(name, "must be INT32")
    if raw is None:
        return tuple(request.inputs[index].contents.int_contents)
    return struct.unpack(f"<{len(raw) // 4}i", raw)


def _remaining_s(request: ModelInferRequest, context: grpc.aio.ServicerContext, max_s: float) -> float:
    """Return the shortest of ``max_s``, the RPC's deadline and the request's parameter ``timeout`` (µs)."""
    limits = [max_s]
    remaining_s = context.time_remaining()
    if remaining_s is not None:
        limits.append(max(0.001, remaining_s))
    if "timeout" in request.parameters:
        timeout_us = request.parameters["timeout"].int64_param
        if timeout_us > 0:
            limits.append(timeout_us / 1e6)
    return min(limits)


def _quoted(request: ModelInferRequest, carrier: Mapping[str, str]) -> str:
    """Return the id of a request in logs and messages."""
    return _quotable(carrier.get("x-request-id") or request.id) or new_request_id()


def _quotable(request_id: str) -> str:
    """Return the id, "" if it cannot go into logs and metadata. Responses always carry it unchanged."""
    return request_id if can_travel(request_id) else ""


def _carrier(context: grpc.aio.ServicerContext) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


def _unexpected(context: grpc.aio.ServicerContext, request_id: str) -> TridentError:
    """Return the error that the exception under way is to the caller, and log it."""
    if context.done():  # gRPC raises several errors when the client disconnects during a write
        return Cancelled("the client disconnected")
    _LOG.exception("unhandled exception in request %s", request_id)
    return EngineFailed(f"the gateway failed; quote {request_id} when you report it")


def _in_band(error: TridentError, request_id: str) -> bytes:
    message = ModelStreamInferResponse(error_message=errors.to_text(error))
    message.infer_response.id = request_id
    message.infer_response.parameters["triton_final_response"].bool_param = True
    return message.SerializeToString()


def _wants_status(error: TridentError, carrier: Mapping[str, str]) -> bool:
    """Return whether the error ends the RPC, if no other request runs on it."""
    return isinstance(error, _REJECTIONS) or carrier.get("triton_grpc_error") == "true"


def _flag(value: bool) -> bytes:
    return b"\x08\x01" if value else b""


def _model_of(request: bytes) -> tuple[str, str]:
    """Return name and version in a Model…Request, whichever it is; "" if it cannot be read."""
    with contextlib.suppress(DecodeError):
        message = ModelReadyRequest.FromString(request)
        return message.name, message.version
    return "", ""


def _is_packed(name: str) -> bool:
    """Return whether a model's name, perhaps with an adapter, is that of the packed ensemble."""
    return name.partition(":")[0] == packed_delta.MODEL
