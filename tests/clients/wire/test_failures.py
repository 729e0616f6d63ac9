from __future__ import annotations

import grpc
import pytest

from clients.wire import failures, protobuf
from clients.wire.failures import RetryHint
from contract import errors


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("in ensemble 'ensemble', InvalidArgument: max_tokens: must be 1, got 0", errors.InvalidArgument),
        ("in ensemble 'ensemble', PromptTooLong: text_input: 5000 tokens", errors.PromptTooLong),
        ("Overloaded: the engine's queue is full", errors.Overloaded),
        ("[request id: n7] Exceeds maximum queue size", errors.Overloaded),
        ("Request timeout expired", errors.DeadlineExceeded),
        ("Request for unknown model: 'nosuch' is not found", errors.ModelNotFound),
        ("Request for unknown model: 'ensemble' has no available versions", errors.Unavailable),
        ("Stub process 'engine_0_0' is not healthy.", errors.Unavailable),
        ("unexpected inference input 'nonsense' for model 'ensemble'", errors.InvalidArgument),
        (
            "inference input 'text_input' data-type is 'INT32', but model 'ensemble' expects 'BYTES'",
            errors.InvalidArgument,
        ),
        ("[request id: i] unexpected shape for input 'max_tokens' for model 'ensemble'.", errors.InvalidArgument),
        ("This protocol is restricted, expecting header 'triton-grpc-protocol-admin-key'", errors.PermissionDenied),
        ("in ensemble 'ensemble', engine boom", errors.EngineFailed),
    ],
)
def test_what_triton_says_becomes_the_error_it_means(text: str, kind: type) -> None:
    error = failures.from_error_message(text)
    assert type(error) is kind
    assert error.args[0] in text or text.endswith(str(error))


@pytest.mark.parametrize(
    "text",
    [
        "[request id: q] input 'text_input' batch size does not match other inputs for 'ensemble'",
        "[request id: q] input 'text_input' has no shape but model requires batch dimension for 'ensemble'",
        "[request id: q] inference request batch-size must be <= 1 for 'ensemble'",
        "[request id: q] input 'max_tokens' already exists in request",
        "[request id: q] input byte size mismatch for input 'max_tokens' for model 'ensemble'. Expected 4, got 8",
        "[request id: q] expected 1 string elements for inference input 'text_input' for model 'ensemble', got 0",
        "[request id: q] unexpected number of string elements 2 for inference input 'text_input' for model 'ensemble'",
        "[request id: q] incomplete string length indicator for inference input 'text_input' for model 'ensemble'",
        "in ensemble 'ensemble', incomplete string data for inference input 'text_input', expecting string of length 5",
        "in ensemble 'ensemble', [request id: q] out of bounds index 0: request has 0 inputs",
        "unexpected explicit tensor data for input tensor 'max_tokens' for model 'ensemble' of type 'INT32'",
        "unexpected 'content' provided when using shared memory for input tensor 'text_input' for model 'ensemble'",
        "contents field must not be specified when using raw_input_contents for 'max_tokens' for model 'ensemble'",
        "unable to find data for input tensor 'max_tokens' for model 'ensemble' in request.",
        "Unable to find shared memory region: 'a'",
        "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter",
        "failed to get model version from specified version string 'x' (details: stol)",
        "invalid value type for 'timeout' parameter, expected int64_param.",
        "invalid value for 'priority', expected value >= 0.",
        "parameter keys starting with 'triton_' are reserved for Triton usage.",
        # Names that a caller chose are not Triton's words.
        "unexpected inference input 'Unavailable: x is not healthy' for model 'ensemble'",
        "[request id: r] Unavailable: is not healthy] unexpected shape for input 'max_tokens' for model 'ensemble'.",
    ],
)
def test_a_request_that_is_wrong_in_itself_is_no_failure_of_the_server(text: str) -> None:
    assert type(failures.from_error_message(text)) is errors.InvalidArgument


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size", errors.Overloaded),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", errors.Unavailable),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "tenant over budget", errors.Overloaded),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", errors.DeadlineExceeded),
        (grpc.StatusCode.UNAUTHENTICATED, "no key", errors.Unauthenticated),
        (grpc.StatusCode.PERMISSION_DENIED, "not yours", errors.PermissionDenied),
        (grpc.StatusCode.INVALID_ARGUMENT, "max_tokens: got 0", errors.InvalidArgument),
        (grpc.StatusCode.NOT_FOUND, "no such model", errors.ModelNotFound),
        (grpc.StatusCode.CANCELLED, "gone", errors.Cancelled),
        (grpc.StatusCode.INTERNAL, "boom", errors.EngineFailed),
        (grpc.StatusCode.DATA_LOSS, "odd", errors.EngineFailed),
        (grpc.StatusCode.INTERNAL, "NotFound: no stream of that id", errors.NotFound),
    ],
)
def test_a_grpc_status_becomes_the_error_it_means(code: grpc.StatusCode, details: str, kind: type) -> None:
    assert type(failures.from_rpc(code, details)) is kind


def test_a_server_that_cannot_be_reached_is_named_with_the_cause_alone() -> None:
    details = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused"
    error = failures.from_rpc(grpc.StatusCode.UNAVAILABLE, details, "127.0.0.1:1")
    assert str(error) == "cannot reach 127.0.0.1:1: UNKNOWN: ipv4:127.0.0.1:1: Connection refused"


def test_a_server_without_the_call_is_named() -> None:
    error = failures.from_rpc(grpc.StatusCode.UNIMPLEMENTED, "Method not found!", "127.0.0.1:9001")
    assert str(error) == "127.0.0.1:9001 does not offer this call: Method not found!"


def test_a_name_that_does_not_resolve_is_a_server_that_was_not_reached() -> None:
    details = "errors resolving nosuch:1: [field:hostname lookup error:address lookup failed: Domain name not found]"
    assert failures.never_reached(grpc.StatusCode.UNAVAILABLE, details)
    assert str(failures.from_rpc(grpc.StatusCode.UNAVAILABLE, details, "nosuch:1")).startswith("cannot reach nosuch:1")


def test_a_field_survives_the_wire() -> None:
    error = failures.from_rpc(grpc.StatusCode.INVALID_ARGUMENT, "max_tokens: must be 1, got 0")
    assert (error.field, error.problem) == ("max_tokens", "must be 1, got 0")


def test_the_longest_wait_of_all_hints_is_taken() -> None:
    trailers = (("retry-after-ms", "250"), ("grpc-retry-pushback-ms", "100"), ("content-type", "application/grpc"))
    assert failures.retry_hint(trailers) == RetryHint(0.25)


def test_a_wait_without_end_is_no_hint() -> None:
    assert failures.retry_hint([("retry-after-ms", "inf")]) == RetryHint()
    assert failures.retry_hint([("retry-after-ms", "nan")]) == RetryHint()


@pytest.mark.parametrize("pushback", ["-1", "soon", "inf"])
def test_a_negative_or_unreadable_pushback_means_never(pushback: str) -> None:
    assert failures.retry_hint([("grpc-retry-pushback-ms", pushback)]).never


def test_no_trailers_are_no_hint() -> None:
    assert failures.retry_hint(None) == failures.retry_hint([("retry-after-ms", "x")]) == RetryHint()


def test_retry_info_in_the_status_details_is_read() -> None:
    delay = b"\x08" + protobuf.varint(1) + b"\x10" + protobuf.varint(500_000_000)
    detail = protobuf.text(1, "type.googleapis.com/google.rpc.RetryInfo") + protobuf.chunk(2, protobuf.chunk(1, delay))
    other = protobuf.text(1, "type.googleapis.com/google.rpc.ErrorInfo") + protobuf.chunk(2, b"\x08\x07")
    status = b"\x08\x08" + protobuf.text(2, "full") + protobuf.chunk(3, other) + protobuf.chunk(3, detail)
    assert failures.retry_hint([("grpc-status-details-bin", status)]) == RetryHint(1.5)
    assert failures.retry_hint([("grpc-status-details-bin", status[:-3])]) == RetryHint()


def test_the_hint_travels_with_the_errors_that_may_be_retried() -> None:
    hint = RetryHint(0.5)
    assert failures.from_rpc(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", hint=hint).retry_after_s == 0.5
    assert failures.from_rpc(grpc.StatusCode.UNAVAILABLE, "draining", hint=hint).retry_after_s == 0.5
