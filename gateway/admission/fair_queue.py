"""Fair scheduling: bounded queues by priority class and tenant. No clock and no I/O: callers pass the time.

Between classes the more urgent one goes first. Priority aging: a class whose oldest request has waited ``aging_s``
shares the turns of the next more urgent one, and so on. A class ages as a whole: if requests aged alone, a tenant would
get more of its own class the longer its queue is. Between the tenants of a class: deficit round robin (Shreedhar and
Varghese, 1995) in tokens, by weight. Within a tenant: earliest deadline, then first come.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from contract.errors import Overloaded
from gateway.config.policy import AdmissionRules

# Entries by class and by tenant, and the backlog.
State = tuple[defaultdict[int, int], defaultdict[str, int], defaultdict[int, float]]


@dataclass(eq=False)
class Entry:
    """One request that waits.

    cost_tokens: what it may use, at least 1. slots: one for each choice, given one at a time; it has ``begun`` so many.
    charged: tokens of those that it was given while other tenants could have had them.
    longest_tokens: what one of its choices may generate. priority: 0 is the most urgent. share: of the slots, for this
    and less urgent priorities. deadline_s: on the caller's clock. work: the caller's own.
    """

    tenant: str
    cost_tokens: float
    priority: int = 1
    weight: float = 1.0
    deadline_s: float = math.inf
    slots: int = 1
    longest_tokens: int = 0
    share: float = 1.0
    work: Any = None
    begun: int = 0
    charged: float = 0.0
    sequence: int = -1
    waiting: bool = False

    def part(self, number: int) -> float:
        """Return the tokens of one of its slots: an equal part of the whole; the last one has what is left over."""
        each = self.cost_tokens // self.slots
        return each if number < self.slots - 1 else self.cost_tokens - each * (self.slots - 1)

    @property
    def next_cost(self) -> float:
        """Tokens of the next slot it is given."""
        return self.part(self.begun)

    @property
    def cost_left(self) -> float:
        """Tokens of the slots it was not given yet."""
        return self.cost_tokens - self.cost_tokens // self.slots * self.begun if self.begun < self.slots else 0


@dataclass(eq=False)
class _Flow:
    """One tenant in one class."""

    weight: float
    deficit: float = 0.0
    in_turn: bool = False
    heap: list[tuple[float, int, Entry]] = field(default_factory=list)

    def head(self) -> Entry | None:
        """Return the next entry; drop those before it that have left the queue."""
        while self.heap and not self.heap[0][2].waiting:
            heapq.heappop(self.heap)
        return self.heap[0][2] if self.heap else None


class FairQueue:
    """The queue of one pool. by_class, by_tenant: entries that wait. rules: its bounds, quantum and aging."""

    def __init__(self, rules: AdmissionRules | None = None) -> None:
        self.rules = rules or AdmissionRules()  # later rules leave the entries that wait
        self._flows: OrderedDict[tuple[int, str], _Flow] = OrderedDict()  # by class and tenant, in the order of turns
        self._came: dict[int, deque[tuple[float, Entry]]] = {}  # by class, in the order they came
        self._deadlines: list[tuple[float, int, Entry]] = []
        self._shortest: list[tuple[int, int, Entry]] = []
        self.by_class: defaultdict[int, int] = defaultdict(int)
        self.by_tenant: defaultdict[str, int] = defaultdict(int)
        self._expired: list[Entry] = []
        self._sequence = itertools.count()
        self._left = 0  # entries that left since the heaps were last rid of such
        self.backlog: defaultdict[int, float] = defaultdict(float)  # tokens by class

    def __len__(self) -> int:
        return sum(self.by_class.values())

    @property
    def backlog_tokens(self) -> float:
        return sum(self.backlog.values())

    def state(self) -> State:
        """Return what tells how full it is, for ``mirror``."""
        return self.by_class.copy(), self.by_tenant.copy(), self.backlog.copy()

    def mirror(self, state: State) -> None:
        """Look as full as another queue."""
        self.by_class, self.by_tenant, self.backlog = state

    def check_room(self, tenant: str, priority: int) -> None:
        """Raise Overloaded that names the full queue."""
        waiting, most = self.by_class.get(priority, 0), self.rules.max_waiting_per_class
        if waiting >= most:
            raise Overloaded(f"queue full: {waiting} of {most} requests wait in priority class {priority}")
        waiting, most = self.by_tenant.get(tenant, 0), self.rules.max_waiting_per_tenant
        if waiting >= most:
            raise Overloaded(f"queue full: {waiting} of {most} requests of {tenant} wait")

    def push(self, entry: Entry, now_s: float) -> None:
        """Raises Overloaded if a bound is reached, and then nothing has changed."""
        self.check_room(entry.tenant, entry.priority)
        entry.sequence = next(self._sequence)
        entry.waiting = True
        self.by_class[entry.priority] += 1
        self.by_tenant[entry.tenant] += 1
        self.backlog[entry.priority] += entry.cost_tokens
        flow = self._flows.setdefault((entry.priority, entry.tenant), _Flow(entry.weight))
        flow.weight = entry.weight
        heapq.heappush(flow.heap, (entry.deadline_s, entry.sequence, entry))
        self._came.setdefault(entry.priority, deque()).append((now_s, entry))
        heapq.heappush(self._shortest, (entry.longest_tokens, entry.sequence, entry))
        if entry.deadline_s < math.inf:
            heapq.heappush(self._deadlines, (entry.deadline_s, entry.sequence, entry))

    def extend(self, entry: Entry, deadline_s: float) -> None:
        """Give a waiting entry a later deadline; its order among its tenant's entries stays."""
        entry.deadline_s = deadline_s
        if deadline_s < math.inf:
            heapq.heappush(self._deadlines, (deadline_s, entry.sequence, entry))

    def shortest_tokens(self) -> float:
        """Return the smallest ``longest_tokens`` of all that wait; infinity if nothing does."""
        while self._shortest and not self._shortest[0][2].waiting:
            heapq.heappop(self._shortest)
        return self._shortest[0][0] if self._shortest else math.inf

    def remove(self, entry: Entry) -> bool:
        """Remove an entry before its turn; return False if it does not wait any more."""
        if not entry.waiting:
            return False
        entry.waiting = False
        self.backlog[entry.priority] -= entry.cost_left
        self.by_class[entry.priority] -= 1
        if not self.by_class[entry.priority]:
            del self.by_class[entry.priority]
        self.by_tenant[entry.tenant] -= 1
        if not self.by_tenant[entry.tenant]:
            del self.by_tenant[entry.tenant]
            for priority in self._came:
                self._flows.pop((priority, entry.tenant), None)
        self._left += 1
        if self._left > 64 + len(self):
            self._remove_left_entries()
        return True

    def expire(self, now_s: float) -> list[Entry]:
        """Remove the entries whose deadline has passed, and return those removed since the last call."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            deadline_s, _, entry = heapq.heappop(self._deadlines)
            if deadline_s == entry.deadline_s and self.remove(entry):
                self._expired.append(entry)
        expired, self._expired = self._expired, []
        return expired

    def next_deadline_s(self) -> float:
        """Return when ``expire`` has something to remove next; infinity if never."""
        while self._deadlines and not _holds(self._deadlines[0]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def pop(self, now_s: float, may_run: Callable[[Entry], bool] = lambda entry: True) -> Entry | None:
        """Return the entry that gets the next slot, or None; a tenant whose next entry may not run is passed over. It
        stays in the queue until it was given all its slots. The expired stay for ``expire``."""
        self._expired = self.expire(now_s)
        for classes in self._by_urgency(now_s):
            if heads := self._heads(classes, may_run):
                entry = self._turn(heads)
                cost = entry.next_cost
                self._flows[entry.priority, entry.tenant].deficit -= cost
                entry.charged += cost if len(heads) > 1 else 0
                entry.begun += 1
                self.backlog[entry.priority] -= cost
                if entry.begun == entry.slots:
                    self.remove(entry)
                return entry
        return None

    def give_back(self, entry: Entry, unused_tokens: float) -> None:
        """Credit a tenant that has more waiting with what a request was charged and did not use; negative: it used
        more. What it was given while no other tenant waited cost it no turn, and is no credit against later ones."""
        flow = self._flows.get((entry.priority, entry.tenant))
        if flow is not None and entry.charged:
            flow.deficit += unused_tokens * entry.charged / (entry.cost_tokens - entry.cost_left)

    def _by_urgency(self, now_s: float) -> list[set[int]]:
        """Return the classes with waiting entries, the most urgent first; aged classes share a set."""
        together: defaultdict[int, set[int]] = defaultdict(set)
        for priority, line in self._came.items():
            while line and not line[0][1].waiting:
                line.popleft()
            if line:
                together[max(0, priority - int((now_s - line[0][0]) / self.rules.aging_s))].add(priority)
        return [together[level] for level in sorted(together)]

    def _heads(self, classes: set[int], may_run: Callable[[Entry], bool]) -> dict[tuple[int, str], Entry]:
        """Return the next entry of each tenant of these classes, if it may run."""
        heads: dict[tuple[int, str], Entry] = {}
        for key, flow in list(self._flows.items()):
            if key[0] in classes:
                head = flow.head()
                if head is None:
                    del self._flows[key]  # with its deficit: an idle tenant saves up no credit
                elif may_run(head):
                    heads[key] = head
        return heads

    def _turn(self, heads: Mapping[tuple[int, str], Entry]) -> Entry:
        """Return the next of these entries by deficit round robin; repeated calls return the same entry. A tenant at
        the front gets its quantum once a turn, sends while that lasts, and goes to the back."""
        flows = self._flows
        while True:
            for key in [key for key in flows if key in heads]:
                flow, cost = flows[key], heads[key].next_cost
                if not flow.in_turn:
                    flow.deficit += self.rules.quantum_tokens * flow.weight
                    flow.in_turn = True
                if cost <= flow.deficit:
                    return heads[key]
                flow.in_turn = False
                flows.move_to_end(key)
            # No tenant had enough credit: add as many rounds at once as one needs.
            quantum = self.rules.quantum_tokens
            rounds = min(
                math.ceil((heads[key].next_cost - flows[key].deficit) / (quantum * flows[key].weight)) for key in heads
            )
            for key in heads:
                flows[key].deficit += (rounds - 1) * quantum * flows[key].weight

    def _remove_left_entries(self) -> None:
        """Remove entries that have left from the heaps, which drop them only at their top and would grow otherwise."""
        self._left = 0
        self._deadlines = [item for item in self._deadlines if _holds(item)]
        heapq.heapify(self._deadlines)
        self._shortest = [item for item in self._shortest if item[2].waiting]
        heapq.heapify(self._shortest)
        for priority, line in self._came.items():
            self._came[priority] = deque(item for item in line if item[1].waiting)
        for flow in self._flows.values():
            flow.heap = [item for item in flow.heap if item[2].waiting]
            heapq.heapify(flow.heap)


def _holds(item: tuple[float, int, Entry]) -> bool:
    """Whether the entry still waits, and with this deadline."""
    deadline_s, _, entry = item
    return entry.waiting and deadline_s == entry.deadline_s
