"""What keeps a caller in one pool and on one side of a release."""

from gateway.config.tenant import Tenant
from gateway.request_context import RequestContext


def test_a_caller_is_its_conversation_else_its_user_else_nobody():
    def context(**named: str) -> RequestContext:
        return RequestContext(Tenant(), "http", "chat", "r", **named)

    assert context().caller == ""
    assert context(user="u").caller == context(user="u").caller != context(user="v").caller
    assert context(session="s", user="u").caller == "s"
