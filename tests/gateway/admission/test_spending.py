"""The bound of a day holds at every moment, whatever requests turn out to cost."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.spending import Spending

COSTS = st.floats(0.0, 3.0)


@given(st.lists(st.tuples(COSTS, st.floats(0.0, 1.0), st.booleans()), max_size=20))
def test_what_is_spent_and_may_be_spent_never_exceeds_the_bound(requests):
    spending, running = Spending(), []
    for cost, part, ends in requests:
        free = 5.0 - spending.used()
        assert spending.try_reserve(cost, 5.0) == (cost <= free)
        if cost <= free:
            running.append((cost, part))
        if ends and running:
            reserved, used = running.pop()
            spending.settle(0, reserved, reserved * used)
        assert spending.used() <= 5.0 + 1e-9
