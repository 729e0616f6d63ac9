"""The scaling law as an autoscaling policy of Ray Serve (fleet.yaml shows how). Needs no Ray to be imported.

Serve makes it once, in its controller, and calls it ten times a second in a loop that waits for it. So a thread reads
the pages and the file, and a call only looks at what is there. Other arguments restart every replica: what is to be
changed while the fleet runs belongs into the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import weakref
from typing import Any

from cluster.scaling.law import decide
from cluster.scaling.reader import Reader
from cluster.scaling.rules import RulesFile

_LOG = logging.getLogger(__name__)
INTERVAL_S = 1.0  # between two readings
KEY = "trident"  # of our part of the policy's state, beside Serve's own


class TokensPolicy:
    """Wants as many replicas as the scaling law says.

    gateways: as of Reader. pool: of the gateways that these replicas serve. config: TOML file of rules; "": defaults.
    consoles, token_file: as of Reader; "" for none.
    Raises InvalidArgument for wrong arguments, when it is made; a call never raises.
    """

    def __init__(
        self, gateways: list[str], pool: str = "", config: str = "", consoles: str = "", token_file: str = ""
    ) -> None:
        self._pool, self._rules = pool, RulesFile(config)
        self._reader = Reader(gateways, consoles=consoles, token_file=token_file)
        self._readings = 0
        self._decided: tuple[int, int, dict[str, Any]] = (-1, 0, {})  # at which reading, what, the state
        self._failed = False
        follow = (self._reader, weakref.proxy(self))
        threading.Thread(target=_follow, args=follow, name="scaling-reader", daemon=True).start()

    def _read(self) -> None:
        self._rules.refresh()
        self._readings += 1

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        """Return the wanted replicas and the state for the next call."""
        try:
            return self._wanted(ctx)
        except Exception:  # Serve would stop updating every application
            if not self._failed:
                _LOG.exception("the policy failed; %s replicas stay", ctx.target_num_replicas)
            self._failed = True
            return ctx.target_num_replicas, dict(ctx.policy_state or {})

    def _wanted(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        state = dict(ctx.policy_state or {})
        if self._decided[0] != self._readings:
            rules, load = self._rules.rules.of(self._pool), self._reader.load(self._pool)
            decision = decide(rules, load, state.get(KEY), time.time(), ctx.target_num_replicas)
            if decision.wanted != ctx.target_num_replicas:
                _LOG.info("pool %r: %s", self._pool, decision.reason)
            self._reader.decisions[self._pool] = decision
            self._decided = self._readings, decision.wanted, decision.state
        _, wanted, own = self._decided
        return wanted, {**state, KEY: own}


def _follow(reader: Reader, policy: TokensPolicy) -> None:
    """Read the pages while the policy lives: for other arguments Serve makes another, in the same process."""
    with contextlib.suppress(ReferenceError):
        asyncio.run(reader.watch(lambda: policy._read(), INTERVAL_S))
