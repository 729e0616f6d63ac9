import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from python_backends.cpu_engine import http_disconnects
from python_backends.cpu_engine.http_disconnects import HttpDisconnects

SECOND = 1_000_000_000


class Looks:
    """Looks a second apart at ``live`` requests, of which the kernel says that ``closed`` connections were left."""

    def __init__(self):
        self.closed, self.now_ns, self.asked = frozenset(), 0, 0
        self.disconnects = HttpDisconnects(self._half_closed)

    def _half_closed(self):
        self.asked += 1
        return self.closed

    def __call__(self, live, closed, silent=0):
        self.closed = frozenset(map(str, range(closed))) if isinstance(closed, int) else closed
        self.now_ns += SECOND
        assert self.disconnects.due(self.now_ns)
        found = self.disconnects.check(frozenset(live), self.now_ns, silent)
        assert not self.disconnects.due(self.now_ns + SECOND - 1)
        return set(found)


@pytest.fixture
def look():
    return Looks()


def test_requests_were_left_when_two_looks_find_a_closed_connection_for_each(look):
    assert look({1, 2}, 2) == set()
    assert look({1, 2}, 2) == {1, 2}


def test_one_caller_who_is_still_there_keeps_all(look):
    for _ in range(5):
        assert look({1, 2, 3}, 2) == set()


def test_a_closed_connection_may_be_that_of_a_stream_without_a_response(look):
    for _ in range(5):
        assert look({1}, 1, silent=1) == set()
    assert look({1}, 2, silent=1) == set()
    assert look({1}, 2, silent=1) == {1}


def test_a_request_that_is_new_or_has_ended_starts_the_count_again(look):
    assert look({1, 2}, 2) == set()
    assert look({1, 3}, 2) == set()
    assert look({1, 3}, 2) == {1, 3}
    assert look({4}, 1) == set()


def test_connections_that_others_have_closed_for_a_moment_are_no_callers(look):
    for number in range(5):  # of a health check each second, which the server closes late
        assert look({1}, {f"check {number}"}) == set()


def test_with_nothing_or_very_much_running_the_kernel_is_not_asked(look):
    assert look(set(), 0) == set()
    assert look(range(65), 65) == set() == look(range(65), 65)
    assert look.asked == 0


@given(st.lists(st.tuples(st.frozensets(st.integers(1, 4)), st.integers(0, 4)), max_size=12))
def test_only_what_every_caller_has_left_at_two_looks_is_ended(history):
    look = Looks()
    before = None
    for live, closed in history:
        left = bool(live) and closed == len(live)
        expected = set(live) if left and before == live else set()
        assert look(live, closed) == expected
        before = live if left else None


def counted(port, expected):
    """Return whether so many connections are counted, once in ten: rows of the table move while others connect."""
    return any(len(http_disconnects.half_closed(port)) == expected for _ in range(10))


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_kernel_tells_callers_who_have_closed_from_those_who_have_not(family):
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with server:
        port = server.getsockname()[1]
        callers = [socket.create_connection((host, port)) for _ in range(3)]
        accepted = [server.accept()[0] for _ in callers]
        assert counted(port, 0)
        callers[0].close()
        assert accepted[0].recv(1) == b""  # the kernel has it
        assert counted(port, 1)
        callers[1].shutdown(socket.SHUT_WR)
        assert accepted[1].recv(1) == b""
        assert counted(port, 2)
        assert counted(callers[2].getsockname()[1], 0)
        accepted[0].close()
        assert counted(port, 1)
        for one in (*callers, *accepted):
            one.close()


def test_without_tables_no_client_has_left(tmp_path):
    assert not http_disconnects.half_closed(8000, [tmp_path / "none"])
