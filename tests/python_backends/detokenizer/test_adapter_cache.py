"""The adapters that the C++ backend must be sent, against a cache with the backend's rules."""

from collections import OrderedDict

from hypothesis import example, given
from hypothesis import strategies as st

from python_backends.detokenizer.adapter_cache import DOUBT_NS, AdapterCache

MS = 1_000_000


class Backend:
    """Keeps ``capacity`` adapters; running ones stay, of the others the one that ended longest ago goes."""

    def __init__(self, capacity):
        self.capacity, self.running, self.done = capacity, [], OrderedDict()

    def start(self, adapter, has_weights):
        """Whether the request runs; without room it fails as one that is full, not as one that lacks weights."""
        held = {*self.running, *self.done}
        if adapter not in held:
            assert has_weights, f"the backend does not have {adapter}"
            if len(held) >= self.capacity:
                if not self.done:
                    return False
                self.done.popitem(last=False)
        self.done.pop(adapter, None)
        self.running.append(adapter)
        return True

    def end(self, adapter):
        self.running.remove(adapter)
        if adapter not in self.running:
            self.done[adapter] = None


@given(
    capacity=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(("start", "token", "end", "cancel")), st.integers(1, 5)), max_size=60),
)
@example(2, [("start", 2), ("start", 3), ("end", 2), ("start", 1), ("start", 2)])
@example(2, [("start", 2), ("start", 3), ("end", 2), ("start", 1), ("cancel", 3), ("start", 2)])
def test_no_request_lacks_weights_whatever_runs_at_once(capacity, steps):
    cache, backend = AdapterCache(capacity), Backend(capacity)
    for now_ns, (step, adapter) in enumerate(steps, 1):
        if step == "start":
            backend.start(adapter, bool(cache.send_cause(adapter, now_ns, backend.running)))
        elif adapter in backend.running:
            if step != "cancel":
                cache.generated(adapter, now_ns)  # the last token too
            if step != "token":
                backend.end(adapter)
                cache.ended(adapter, now_ns)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=40))
def test_with_room_for_all_each_adapter_is_sent_once(order):
    cache, sent = AdapterCache(4), []
    for now_ns, adapter in enumerate(order, 1):
        if cause := cache.send_cause(adapter, 2 * now_ns):
            assert cause == "first"
            sent.append(adapter)
        cache.generated(adapter, 2 * now_ns + 1)
    assert sorted(sent) == sorted(set(order))


def test_requests_carry_the_weights_until_one_has_a_token():
    cache = AdapterCache(2)
    assert [cache.send_cause(1, n) for n in (1, 2, 3)] == ["first"] * 3
    cache.generated(1, 4)
    assert [cache.send_cause(1, n) for n in (5, 6)] == ["", ""]


def test_a_request_without_a_token_for_long_makes_the_next_ones_carry_the_weights():
    cache = AdapterCache(2)
    cache.send_cause(1, MS)
    cache.generated(1, 2 * MS)
    assert cache.send_cause(1, 10 * MS) == ""  # fails: somebody loaded the backend again
    assert cache.send_cause(1, 10 * MS + DOUBT_NS) == ""
    assert cache.send_cause(1, 11 * MS + DOUBT_NS) == cache.send_cause(1, 12 * MS + DOUBT_NS) == "again"
    cache.generated(1, 13 * MS + DOUBT_NS)
    assert cache.send_cause(1, 14 * MS + DOUBT_NS) == ""


def test_what_else_the_backend_had_before_that_request_is_sent_again_too():
    cache = AdapterCache(3)
    for adapter in (1, 2, 3):
        cache.send_cause(adapter, adapter * MS)
        cache.generated(adapter, (adapter + 1) * MS)
    assert cache.send_cause(1, 10 * MS) == ""  # fails
    cache.generated(3, 11 * MS)
    assert cache.send_cause(1, 11 * MS + DOUBT_NS) == "again"
    assert [cache.send_cause(adapter, 12 * MS + DOUBT_NS) for adapter in (2, 3)] == ["again", ""]
