"""What is said in an order that Envoy does not keep to. The usual order is tested through the endpoint."""

from __future__ import annotations

import pytest

from gateway.api.picker import ext_proc_pb2 as pb
from gateway.api.picker.exchange import Exchange
from tests.gateway.api.picker.endpoints import pool
from tests.gateway.api.picker.test_endpoint import header_map, headers

pytestmark = pytest.mark.slow


async def test_a_response_before_the_request_is_refused_and_nothing_is_held():
    async with pool(1) as running:
        exchange = Exchange(running.running.service, lambda error: None)
        begin = pb.ProcessingRequest(request_headers={"headers": header_map(headers())})
        assert await exchange.answers(begin) == []
        [answer] = await exchange.answers(pb.ProcessingRequest(response_body={"body": b"x"}))
        assert answer.immediate_response.status.code == 400 and exchange.done
        assert b"must go on with request_body, got response_body" in answer.immediate_response.body
        exchange.close()
        assert not running.running.service.live


async def test_a_request_that_ends_with_trailers_is_picked_for():
    async with pool(1) as running:
        exchange = Exchange(running.running.service, lambda error: None)
        await exchange.answers(pb.ProcessingRequest(request_headers={"headers": header_map(headers())}))
        body = b'{"model": "demo", "messages": [{"role": "user", "content": "x"}]}'
        assert await exchange.answers(pb.ProcessingRequest(request_body={"body": body})) == []
        answers = await exchange.answers(pb.ProcessingRequest(request_trailers={}))
        assert [each.WhichOneof("response") for each in answers] == [
            "request_headers",
            "request_body",
            "request_trailers",
        ]
        assert not answers[1].request_body.response.body_mutation.streamed_response.end_of_stream
        exchange.close()
        assert not running.running.service.live and not running.running.service.bodies.held


async def test_a_permit_is_settled_where_its_body_cannot_be_shortened():
    config = '[classes.short]\npriority = 5\nmax_tokens = 2\noperations = ["responses"]\n'
    async with pool(1, config=config) as running:
        service = running.running.service
        exchange = Exchange(service, lambda error: None)
        given = header_map(headers("/v1/response%73"))
        await exchange.answers(pb.ProcessingRequest(request_headers={"headers": given}))
        body = b'{"model": "demo", "input": "x", "vendor_field": %b%b}' % (b"[" * 300, b"]" * 300)
        message = pb.ProcessingRequest(request_body={"body": body, "end_of_stream": True})
        [answer] = await exchange.answers(message)
        assert answer.immediate_response.status.code == 400
        assert b"body: must have fewer levels" in answer.immediate_response.body
        exchange.close()
        assert not service.admission.running and not service.live
