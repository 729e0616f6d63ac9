"""Serve Envoy's ext_proc as the endpoint picker of the Gateway API Inference Extension, protocol v1.0.0."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace

import grpc
import grpc.aio
import orjson
from google.protobuf.message import DecodeError

from clients.wire import protobuf
from clients.wire.connection import new_request_id
from clients.wire.request import MAX_REQUEST_ID
from contract.errors import DeadlineExceeded, InvalidArgument, TridentError
from gateway.admission.body_budget import Lease
from gateway.admission.fair_admission import Permit
from gateway.api import error_responses
from gateway.api.grpc_endpoint import GrpcEndpoint
from gateway.api.openai_http import check_request_id, joined, requested_timeout_s
from gateway.api.picker import ext_proc_pb2 as pb
from gateway.api.picker import request
from gateway.api.picker.pick import OnCut, Pick
from gateway.request_context import RequestContext
from gateway.service import Service

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"  # HealthCheckResponse
HEADER = "x-gateway-destination-endpoint"
NAMESPACE, SERVED = "envoy.lb", "x-gateway-destination-endpoint-served"
SUBSET_NAMESPACE, SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
_MOST_CHUNK = 62_000  # bytes of one part of a body: proxies bound it at 64 KiB
_DUPLEX = pb.FULL_DUPLEX_STREAMED
_MODES = {"request_body_mode": (_DUPLEX,), "response_body_mode": (_DUPLEX, pb.NONE)}


class EndpointPicker(GrpcEndpoint):
    """Serve ext_proc and gRPC's health service, if the settings have a port for it."""

    port_setting = "picker_port"
    message_bytes = 16 * 1024 * 1024  # a part of a body, and metadata

    def _handlers(self) -> list[grpc.GenericRpcHandler]:
        process = {"Process": grpc.stream_stream_rpc_method_handler(self._process)}
        health = {"Check": grpc.unary_unary_rpc_method_handler(self._check)}
        services = ((SERVICE, process), ("grpc.health.v1.Health", health))
        return [grpc.method_handlers_generic_handler(name, methods) for name, methods in services]

    async def _process(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        handler, failed = asyncio.current_task(), list[TridentError]()

        def cut(error: TridentError) -> None:
            failed.append(error)
            if handler is not None:
                handler.cancel()

        exchange = Exchange(self._service, cut)
        timeout_s = self._service.settings.body_timeout_s
        late_s = time.monotonic() + timeout_s
        try:
            while not exchange.done:
                left_s = None if exchange.pick is not None else max(0.0, late_s - time.monotonic())
                message = pb.ProcessingRequest.FromString(await asyncio.wait_for(anext(requests), left_s))
                for answer in await exchange.answers(message):
                    await context.write(answer.SerializeToString())
        except StopAsyncIteration:
            pass
        except asyncio.TimeoutError:
            slow = DeadlineExceeded(f"the body did not arrive within {timeout_s:g} s")
            await context.write(exchange.refused(slow).SerializeToString())
        except DecodeError:
            failed.append(InvalidArgument("", "the message is not a ProcessingRequest"))
        except TridentError as error:
            failed.append(error)
        except asyncio.CancelledError:
            if not failed:  # Envoy dropped the stream
                raise
        finally:
            exchange.close()
        if failed:
            await context.abort(*error_responses.grpc_status(failed[0]))

    async def _check(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Answer a HealthCheckRequest, whose field 1 names the service."""
        name = dict(protobuf.fields(request)).get(1, b"").decode()
        if name not in ("", "liveness", "readiness", SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"must be liveness, readiness or {SERVICE}")
        return _SERVING if name == "liveness" or self._service.ready() else _NOT_SERVING


class Exchange:
    """What Envoy and the picker say about one request, until ``done``; ``close`` it in any case."""

    def __init__(self, service: Service, on_cut: OnCut) -> None:
        """on_cut: ends the stream, for a request at its deadline or a gateway that stops."""
        self._service, self._on_cut, self._began_s = service, on_cut, time.monotonic()
        self._headers: dict[str, str] = {}
        self._context: RequestContext | None = None
        self._lease: Lease | None = None
        self._subset: list[str] | None = None
        self._kept = bytearray()
        self._answered, self._sees_response = False, True
        self.pick: Pick | None = None
        self.done, self._code = False, "CANCELLED"

    async def answers(self, message: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        """Return what Envoy is told. Raises TridentError once the response has begun: it cannot be taken back."""
        kind = message.WhichOneof("request") or "nothing"
        try:
            if self._context is None:
                return await self._request_headers(message)
            if kind == "request_body":
                return await self._request_body(message.request_body.body, message.request_body.end_of_stream)
            if kind == "request_trailers":
                before = [] if self.pick is not None else await self._read(end=False)
                return [*before, pb.ProcessingResponse(request_trailers=pb.TrailersResponse())]
            if self.pick is None:
                raise InvalidArgument("request", f"must go on with request_body, got {kind}")
            return self._response(self.pick, kind, message)
        except TridentError as error:
            if self._answered:
                raise
            return [self.refused(error)]

    def refused(self, error: TridentError) -> pb.ProcessingResponse:
        """Return the answer that an error is, and end the exchange."""
        self.done, self._code = True, error.grpc_status
        if self.pick is not None:
            self.pick.error = error
        elif self._context is not None:
            self._service.refused(self._context, error, self._began_s)
        headers, status = error_responses.hints(error), error.http_status
        if request.form_of(self._headers) == request.GRPC:
            code = grpc.StatusCode[error.grpc_status].value[0]
            return immediate(status, headers, error.message.encode(), code)
        headers["content-type"] = "application/json"
        return immediate(status, headers, orjson.dumps(error_responses.error_object(error)), None)

    def close(self) -> None:
        """Settle and release what the request holds, and count it."""
        if self._lease is not None:
            self._lease.release()
        if self.pick is not None:  # Envoy says nothing of a response's end where it sends no bodies
            self.pick.close(self._answered and not self._sees_response)
            self._code = self.pick.error.grpc_status if self.pick.error is not None else "OK"
        operation = self._context.operation if self._context is not None else "text_completion"
        self._service.metrics.requests.labels("ext_proc", operation, self._code).inc()

    async def _request_headers(self, message: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        service, headers = self._service, headers_of(message.request_headers.headers)
        self._headers = headers
        for name, allowed in _MODES.items() if message.HasField("protocol_config") else ():
            mode = getattr(message.protocol_config, name)
            if mode not in allowed:
                names = " or ".join(map(pb.BodySendMode.Name, allowed))
                raise InvalidArgument(name, f"must be {names}, got {pb.BodySendMode.Name(mode)}")
            self._sees_response = mode != pb.NONE
        tenant = await service.tenant(headers)
        request_id = headers.get("x-request-id") or new_request_id()
        check_request_id(request_id)
        session = headers.get("x-session-id", "")[:MAX_REQUEST_ID]
        self._context = RequestContext(tenant, "ext_proc", request.operation_of(headers), request_id, headers, session)
        self._lease = service.bodies.lease(tenant.name, alone=service.configuration.keyless)
        self._subset = metadata(message, SUBSET_NAMESPACE, SUBSET)
        if request.generation(headers) and not message.request_headers.end_of_stream:
            return []
        with service.live.admitting():
            permit = await service.admission.admit_reader(tenant, self._context.charge())
        return [await self._picked(permit, self._context, {})]

    async def _request_body(self, data: bytes, end: bool) -> list[pb.ProcessingResponse]:
        if self.pick is not None:
            return streamed("request_body", data, end)
        assert self._lease is not None, "the headers come first"
        self._kept += data
        if len(self._kept) > (most := self._service.settings.max_body_bytes):
            raise InvalidArgument("body", f"must be at most {most} bytes")
        self._lease.grow_to(len(self._kept))
        if end or request.form_of(self._headers) == request.GRPC:
            return await self._read(end)
        return []

    async def _read(self, end: bool) -> list[pb.ProcessingResponse]:
        """Return the answer to headers and body so far; none while its first message is not whole. end: of the body."""
        service, context, headers, body = self._service, self._context, self._headers, bytes(self._kept)
        assert context is not None, "the headers come first"
        timeout_s = requested_timeout_s(headers, service.settings)
        read = request.read(headers, body, service.settings, timeout_s)
        if read is None:
            if end:
                raise InvalidArgument("", "the body ends before its first message does")
            return []
        context = self._context = await service.routed(read.model, read.requests, context)
        requests = [replace(each, adapter=context.model.adapter) for each in read.requests]
        permit = await service.admit(requests, context)
        changed = {}
        if permit.requests[0].max_tokens != requests[0].max_tokens:
            try:
                body = read.shortened(permit.requests[0].max_tokens)
            except BaseException:
                permit.settle(None)
                raise
            changed = {"content-length": str(len(body))} if "content-length" in headers else {}
        answer = await self._picked(permit, context, changed)
        self._kept.clear()
        if self._lease is not None:
            self._lease.release()
        return [answer, *streamed("request_body", body, end)]

    async def _picked(self, permit: Permit, context: RequestContext, headers: dict[str, str]) -> pb.ProcessingResponse:
        """Pick endpoints under a permit and return the answer to the headers. headers: that change besides."""
        form = request.form_of(self._headers)
        self.pick = Pick(self._service, context, permit, form, self._began_s, self._on_cut)
        await self.pick.choose(self._subset)
        return picked(self.pick.endpoints, headers)

    def _response(self, pick: Pick, kind: str, message: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        ends, self._answered = kind == "response_trailers", True
        if kind == "response_headers":
            pick.served(*(metadata(message, NAMESPACE, SERVED) or [""])[:1])
            pick.told(headers_of(message.response_headers.headers))
            added, ends = {"header_mutation": _set(pick.headers)}, message.response_headers.end_of_stream
            answers = [pb.ProcessingResponse(response_headers={"response": added})]
        elif kind == "response_body":
            data, ends = message.response_body.body, message.response_body.end_of_stream
            pick.received(data)
            answers = streamed("response_body", data, ends)
        else:
            pick.told(headers_of(message.response_trailers.trailers))
            answers = [pb.ProcessingResponse(response_trailers=pb.TrailersResponse())]
        if ends:
            pick.close(complete=True)
        return answers


def headers_of(message: pb.HeaderMap) -> dict[str, str]:
    """Return headers by their names in lower case, those sent several times joined by commas."""
    return joined((each.key, each.raw_value.decode("latin-1") or each.value) for each in message.headers)


def metadata(message: pb.ProcessingRequest, namespace: str, key: str) -> list[str] | None:
    """Return the values of an entry of Envoy's metadata, a list or a text with commas; None without it."""
    fields = message.metadata_context.filter_metadata[namespace].fields
    if key not in fields:
        return None
    texts = [each.string_value for each in fields[key].list_value.values] or fields[key].string_value.split(",")
    return [text.strip() for text in texts if text.strip()]


def picked(endpoints: Iterable[str], headers: Mapping[str, str]) -> pb.ProcessingResponse:
    """Return the answer to a request's headers: where it goes, as a header and as metadata. headers: further ones."""
    where = ",".join(endpoints)
    common = {"header_mutation": _set({**headers, HEADER: where}), "clear_route_cache": True}
    response = pb.ProcessingResponse(request_headers={"response": common})
    response.dynamic_metadata[NAMESPACE] = {HEADER: where}
    return response


def streamed(kind: str, data: bytes, end: bool) -> list[pb.ProcessingResponse]:
    """Return the parts of a body that go on. kind: "request_body" or "response_body". end: whether it ends here."""
    made = []
    for at in range(0, max(1, len(data)), _MOST_CHUNK):
        part = {"body": data[at : at + _MOST_CHUNK], "end_of_stream": end and at + _MOST_CHUNK >= len(data)}
        made.append(pb.ProcessingResponse(**{kind: {"response": {"body_mutation": {"streamed_response": part}}}}))
    return made


def immediate(status: int, headers: Mapping[str, str], body: bytes, grpc_code: int | None) -> pb.ProcessingResponse:
    """Return an answer in place of the endpoint's. grpc_code: of a gRPC request; None for others."""
    grpc_status = None if grpc_code is None else {"status": grpc_code}
    response = pb.ImmediateResponse(status={"code": status}, headers=_set(headers), body=body, grpc_status=grpc_status)
    return pb.ProcessingResponse(immediate_response=response)


def _set(headers: Mapping[str, str]) -> pb.HeaderMutation:
    """Return the setting of headers, in place of those that are there."""
    overwrite = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    values = [pb.HeaderValue(key=key, raw_value=value.encode()) for key, value in headers.items()]
    return pb.HeaderMutation(set_headers=[pb.HeaderValueOption(header=one, append_action=overwrite) for one in values])
