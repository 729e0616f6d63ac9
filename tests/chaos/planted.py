"""A gateway or a scaler with defects that chaos must find: ``python -m tests.chaos.planted DEFECT,… PROGRAM …``."""

from __future__ import annotations

import dataclasses
import itertools
import runpy
import sys


def leaked_permit() -> None:
    """Every fifth permit is never settled."""
    from gateway.admission.fair_admission import Permit

    settle, count = Permit.settle, itertools.count(1)

    def leaking(self, usage) -> None:
        if next(count) % 5:
            settle(self, usage)

    Permit.settle = leaking


def _with_text(change) -> None:
    """Change the text of every hundredth delta that the gateway reads from a replica."""
    from clients.wire.response_reader import ResponseReader

    read, count = ResponseReader.read, itertools.count(1)

    def changed(self, data):
        delta = read(self, data)
        if delta is None or not delta.text or next(count) % 100:
            return delta
        return dataclasses.replace(delta, text=change(delta.text))

    ResponseReader.read = changed


def lost_token() -> None:
    _with_text(lambda text: "")


def doubled_token() -> None:
    _with_text(lambda text: text * 2)


def ignored_floor() -> None:
    from cluster.scaling import scaler

    decide = scaler.decide
    scaler.decide = lambda rules, *rest: decide(rules.model_copy(update={"min_replicas": 0}), *rest)


DEFECTS = {plant.__name__: plant for plant in (leaked_permit, lost_token, doubled_token, ignored_floor)}

if __name__ == "__main__":
    defects, program, *arguments = sys.argv[1:]
    for defect in defects.split(","):
        DEFECTS[defect]()
    sys.argv = [program, *arguments]
    runpy.run_module(program, run_name="__main__", alter_sys=True)
