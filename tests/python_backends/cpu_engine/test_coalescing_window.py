from hypothesis import given
from hypothesis import strategies as st

from python_backends.cpu_engine.coalescing_window import COMFORT_NS, MIN_NS, PER_STREAM_NS, CoalescingWindow

MS = 1_000_000
distances = st.integers(1, 50 * MS)


def waits(window, steps_ns, live):
    """How long each step's tokens waited for the burst they left with; those that did not leave are left out."""
    waiting, waited = [], []
    for now_ns in steps_ns:
        waiting.append(now_ns)
        if window.add_step(now_ns, live):
            waited += [now_ns - came_ns for came_ns in waiting]
            waiting = []
    return waited, waiting


@given(st.integers(0, 10_000), st.integers(0, 10**9))
def test_the_window_grows_with_the_streams_from_its_least_to_its_bound(live, bound):
    window = CoalescingWindow(bound)
    assert window.width_ns(0) <= window.width_ns(live) <= window.width_ns(live + 1) <= bound
    assert window.width_ns(live) in (bound, MIN_NS, COMFORT_NS, live * PER_STREAM_NS, live * PER_STREAM_NS // 2)


@given(st.lists(distances, min_size=1, max_size=30), st.integers(1, 64))
def test_without_a_window_and_with_steps_that_are_wider_every_step_leaves_at_once(gaps_ns, live):
    now_ns, none, wide = 10**12, CoalescingWindow(0), CoalescingWindow(20 * MS)
    for gap_ns in gaps_ns:
        now_ns += gap_ns + 20 * MS
        assert none.add_step(now_ns, live) and wide.add_step(now_ns, live)


@given(st.integers(MS // 2, 50 * MS), st.integers(2, 64), st.integers(1, 20 * MS))
def test_at_an_even_pace_no_token_waits_longer_than_the_window_and_as_many_steps_leave_together_as_fit(
    gap, live, bound
):
    window = CoalescingWindow(bound)
    begin_ns = 10**12
    waits(window, [begin_ns, begin_ns + gap], live)  # it knows the pace now
    while not window.add_step(begin_ns := begin_ns + gap, live):
        pass
    steps = window.width_ns(live) // gap + 1
    waited, left = waits(window, [begin_ns + (n + 1) * gap for n in range(3 * steps)], live)
    assert sorted(waited) == sorted(list(range(0, steps * gap, gap)) * 3) and not left
    assert max(waited) <= window.width_ns(live)


@given(st.lists(distances, min_size=1, max_size=40), st.integers(1, 64))
def test_between_steps_the_window_is_over_when_its_oldest_token_has_waited_so_long(gaps_ns, live):
    now_ns, window, oldest_ns = 10**12, CoalescingWindow(18 * MS), None
    for gap_ns in gaps_ns:
        look_ns = now_ns + gap_ns // 2
        late = oldest_ns is not None and look_ns - oldest_ns > window.width_ns(live)
        assert window.expired(look_ns, live) == late
        oldest_ns = None if late else oldest_ns
        now_ns += gap_ns
        oldest_ns = None if window.add_step(now_ns, live) else now_ns if oldest_ns is None else oldest_ns
