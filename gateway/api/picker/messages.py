"""The messages of ext_proc: what they tell, and what answers them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gateway.api.picker import ext_proc_pb2 as pb

HEADER = "x-gateway-destination-endpoint"
NAMESPACE, SERVED = "envoy.lb", "x-gateway-destination-endpoint-served"
SUBSET_NAMESPACE, SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
_MOST_CHUNK = 62_000  # bytes of one part of a body: proxies bound it at 64 KiB


def headers_of(message: pb.HeaderMap) -> dict[str, str]:
    """Return headers by their names in lower case, those sent several times joined by commas."""
    found: dict[str, str] = {}
    for header in message.headers:
        value = header.raw_value.decode("latin-1") or header.value
        found[header.key] = f"{found[header.key]}, {value}" if header.key in found else value
    return found


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


def body(kind: str, data: bytes, end: bool) -> list[pb.ProcessingResponse]:
    """Return the parts of a body that go on. kind: "request_body" or "response_body". end: whether it ends here."""
    made = []
    for at in range(0, max(1, len(data)), _MOST_CHUNK):
        part = {"body": data[at : at + _MOST_CHUNK], "end_of_stream": end and at + _MOST_CHUNK >= len(data)}
        made.append(pb.ProcessingResponse(**{kind: {"response": {"body_mutation": {"streamed_response": part}}}}))
    return made


def response_headers(headers: Mapping[str, str]) -> pb.ProcessingResponse:
    """Return the answer to a response's headers. headers: to add to them."""
    return pb.ProcessingResponse(response_headers={"response": {"header_mutation": _set(headers)}})


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
