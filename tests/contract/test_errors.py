import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import errors
from contract.errors import (
    BY_GRPC_STATUS,
    BY_NAME,
    DeadlineExceeded,
    EngineFailed,
    InvalidArgument,
    Overloaded,
    PromptTooLong,
    TridentError,
    Unavailable,
    from_text,
    make,
    of_ours,
    to_text,
)

# kind -> gRPC status, HTTP status, whether to retry: the table that the module's docstring draws.
TABLE = {
    "InvalidArgument": ("INVALID_ARGUMENT", 400, False),
    "PromptTooLong": ("INVALID_ARGUMENT", 400, False),
    "Unauthenticated": ("UNAUTHENTICATED", 401, False),
    "PermissionDenied": ("PERMISSION_DENIED", 403, False),
    "NotFound": ("NOT_FOUND", 404, False),
    "ModelNotFound": ("NOT_FOUND", 404, False),
    "Cancelled": ("CANCELLED", 499, False),
    "Overloaded": ("RESOURCE_EXHAUSTED", 429, True),
    "Unavailable": ("UNAVAILABLE", 503, True),
    "DeadlineExceeded": ("DEADLINE_EXCEEDED", 504, False),
    "EngineFailed": ("INTERNAL", 500, False),
}


def test_every_kind_wears_what_the_table_says():
    found = {name: (cls.grpc_status, cls.http_status, cls.retryable) for name, cls in BY_NAME.items()}
    assert found.pop("TridentError") == ("INTERNAL", 500, False)
    assert found == TABLE


def test_the_docstring_draws_the_same_table():
    for name, (grpc_status, http_status, retryable) in TABLE.items():
        [line] = [line for line in errors.__doc__.splitlines() if f"── {name} " in line]
        assert line.split()[-3 if retryable else -2 :] == [grpc_status, str(http_status)] + ["retry"] * retryable


def test_one_kind_speaks_for_each_status():
    assert {status: cls.__name__ for status, cls in BY_GRPC_STATUS.items()} == {
        status: name for name, (status, *_) in TABLE.items() if name not in ("PromptTooLong", "ModelNotFound")
    }


def test_a_refusal_names_its_field():
    error = InvalidArgument("max_tokens", "must be 1 to 8, got 0")
    assert (error.field, error.problem, error.message) == ("max_tokens", "must be 1 to 8, got 0", str(error))
    assert str(error) == "max_tokens: must be 1 to 8, got 0"
    assert str(InvalidArgument("", "the request is empty")) == "the request is empty"


def test_an_error_that_passes_may_say_when_to_come_back():
    assert Overloaded("full", retry_after_s=1.5).retry_after_s == 1.5
    assert Unavailable("starting").retry_after_s is None


messages = st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=60)


@given(st.sampled_from(sorted(BY_NAME)), messages)
def test_an_error_survives_its_text_and_tritons_prefix(name, message):
    error = make(BY_NAME[name], message)
    for prefix in ("", "in ensemble 'ensemble', ", "[request id: <id_unknown>] "):
        read = from_text(prefix + to_text(error))
        assert type(read) is type(error) and str(read) == str(error)


@given(st.sampled_from(["max_tokens", "runtime_top_p (top_p)", "x-tenant"]), messages)
def test_a_refusals_field_survives_its_text(field, problem):
    read = from_text(to_text(PromptTooLong(field, problem)))
    assert (type(read), read.field, read.problem) == (PromptTooLong, field, problem)


def test_the_first_kind_named_is_the_error_and_later_ones_are_part_of_what_it_says():
    read = from_text("EngineFailed: the worker said InvalidArgument: max_tokens: got 0")
    assert type(read) is EngineFailed and str(read) == "the worker said InvalidArgument: max_tokens: got 0"
    assert type(from_text("DeadlineExceeded: Unavailable: x")) is DeadlineExceeded


@pytest.mark.parametrize("text", ["", "Request for unknown model: 'x' is not found", "XNotFound: y", "NotFound"])
def test_a_foreign_text_is_no_error_of_ours(text):
    assert from_text(text) is None


def test_everything_we_raise_on_purpose_can_be_caught_at_once():
    assert all(issubclass(cls, TridentError) for cls in BY_NAME.values())


def test_what_is_no_error_of_ours_becomes_one_that_says_what_was_done():
    ours, foreign = InvalidArgument("top_k", "must be 0"), KeyError("top_k")
    assert of_ours(ours, "reading") is ours
    made = of_ours(foreign, "reading")
    assert type(made) is EngineFailed and str(made) == "reading: KeyError('top_k')"
