"""Serve Envoy's ext_proc as the endpoint picker of the Gateway API Inference Extension, protocol v1.0.0."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from clients.wire import protobuf
from contract.errors import DeadlineExceeded, InvalidArgument, TridentError
from gateway.api import error_responses
from gateway.api.grpc_endpoint import GrpcEndpoint
from gateway.api.picker import ext_proc_pb2 as pb
from gateway.api.picker.exchange import Exchange

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"  # HealthCheckResponse


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
