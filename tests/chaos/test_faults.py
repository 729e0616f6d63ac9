"""The table of faults."""

from chaos.envoy import FILTERED
from chaos.faults import KINDS
from contract import failpoint


def test_every_kind_has_what_it_is_done_with():
    for name, kind in KINDS.items():
        action, _, what = name.partition(".")
        assert kind.targets and action in ("kill", "stop", "envoy", "fail"), name
        assert bool(kind.process) == (action in ("kill", "stop")), name
        assert (kind.for_s is None) == (action == "kill" or name == "envoy.reset"), name
        assert action != "fail" or what in failpoint.POINTS, name
        assert action != "envoy" or kind.needs == "envoy" and (name in FILTERED or what == "reset"), name


def test_every_failpoint_is_a_fault():
    assert {f"fail.{point}" for point in failpoint.POINTS} <= KINDS.keys()
