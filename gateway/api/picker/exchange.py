"""What Envoy and the picker say about one request, from its headers to the end of its response."""

from __future__ import annotations

import time
from dataclasses import replace

import grpc
import orjson

from clients.wire.connection import new_request_id
from clients.wire.request import MAX_REQUEST_ID
from contract.errors import InvalidArgument, TridentError
from gateway.admission.body_budget import Lease
from gateway.admission.fair_admission import Permit
from gateway.api import error_responses
from gateway.api.openai_http import check_request_id, requested_timeout_s
from gateway.api.picker import ext_proc_pb2 as pb
from gateway.api.picker import messages, request
from gateway.api.picker.pick import OnCut, Pick
from gateway.request_context import RequestContext
from gateway.service import Service

_DUPLEX = pb.FULL_DUPLEX_STREAMED
_MODES = {"request_body_mode": (_DUPLEX,), "response_body_mode": (_DUPLEX, pb.NONE)}


class Exchange:
    """Answers the messages of one stream of ext_proc; ``close`` it in any case.

    pick: None until the endpoints are chosen.
    done: nothing more is to be said.
    """

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
            return messages.immediate(status, headers, error.message.encode(), code)
        headers["content-type"] = "application/json"
        return messages.immediate(status, headers, orjson.dumps(error_responses.error_object(error)), None)

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
        service, headers = self._service, messages.headers_of(message.request_headers.headers)
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
        self._subset = messages.metadata(message, messages.SUBSET_NAMESPACE, messages.SUBSET)
        if request.generation(headers) and not message.request_headers.end_of_stream:
            return []
        with service.live.admitting():
            permit = await service.admission.admit_reader(tenant, self._context.charge())
        return [await self._picked(permit, self._context, {})]

    async def _request_body(self, data: bytes, end: bool) -> list[pb.ProcessingResponse]:
        if self.pick is not None:
            return messages.body("request_body", data, end)
        assert self._lease is not None, "the headers come first"
        self._kept += data
        if len(self._kept) > (most := self._service.settings.max_body_bytes):
            raise InvalidArgument("body", f"must be at most {most} bytes")
        self._lease.grow_to(len(self._kept))
        if end or request.form_of(self._headers) == request.GRPC:
            return await self._read(end)
        return []

    async def _read(self, end: bool) -> list[pb.ProcessingResponse]:
        """Return the answer to the headers and to the body so far; none while the first message is not whole. end: the
        body ends here."""
        service, context, headers, body = self._service, self._context, self._headers, bytes(self._kept)
        assert context is not None, "the headers come first"
        timeout_s = requested_timeout_s(headers.get("x-trident-timeout-s"), service.settings.request_timeout_s)
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
        picked = await self._picked(permit, context, changed)
        self._kept.clear()
        if self._lease is not None:
            self._lease.release()
        return [picked, *messages.body("request_body", body, end)]

    async def _picked(self, permit: Permit, context: RequestContext, headers: dict[str, str]) -> pb.ProcessingResponse:
        """Pick endpoints under a permit and return the answer to the headers. headers: that change besides."""
        form = request.form_of(self._headers)
        self.pick = Pick(self._service, context, permit, form, self._began_s, self._on_cut)
        await self.pick.choose(self._subset)
        return messages.picked(self.pick.endpoints, headers)

    def _response(self, pick: Pick, kind: str, message: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        ends, self._answered = kind == "response_trailers", True
        if kind == "response_headers":
            pick.served(*(messages.metadata(message, messages.NAMESPACE, messages.SERVED) or [""])[:1])
            pick.told(messages.headers_of(message.response_headers.headers))
            answers, ends = [messages.response_headers(pick.headers)], message.response_headers.end_of_stream
        elif kind == "response_body":
            data, ends = message.response_body.body, message.response_body.end_of_stream
            pick.received(data)
            answers = messages.body("response_body", data, ends)
        else:
            pick.told(messages.headers_of(message.response_trailers.trailers))
            answers = [pb.ProcessingResponse(response_trailers=pb.TrailersResponse())]
        if ends:
            pick.close(complete=True)
        return answers
