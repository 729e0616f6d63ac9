"""What is a violation, by records that are written here."""

import dataclasses

import pytest

from chaos import invariants
from chaos.fleet import CAPPED_REQUESTS
from chaos.invariants import Happened, Record, check
from chaos.load import CUT, LATE, LEFT, LONG, PROMPTS, Outcome
from chaos.scenario import Fault
from contract.prometheus import parse

EXPECTED = {prompt.text: f"the text of {prompt.text}" for prompt in PROMPTS}
PLAIN, METERED, CAPPED = (next(one for one in PROMPTS if one.tenant == name) for name in ("plain", "metered", "capped"))
WELL = {"gateway-1": parse("trident_gateway_in_flight 0"), "gateway-2": parse("trident_gateway_in_flight 0")}


def outcome(prompt=PLAIN, **changes) -> Outcome:
    whole = Outcome(prompt, "http", "gateway-1", 5.0, 6.0, EXPECTED[prompt.text], 1, tokens=(3, prompt.max_tokens))
    whole.logged = whole.tokens
    return dataclasses.replace(whole, **{"reason": "length", **changes})


def record(*outcomes: Outcome, faults=(), **changes) -> Record:
    happened = [Happened(Fault(at, kind, target), at, at) for at, kind, target in faults]
    base = Record(EXPECTED, 2, outcomes=outcomes, happened=happened, samples=[(9.0, WELL)], load_ended_s=8, settled_s=9)
    base.inputs = dict.fromkeys(EXPECTED, 3)
    return dataclasses.replace(base, **{"held_s": {"TridentReplicaOut": 2.0, "TridentGatewayDown": 2.0}, **changes})


def violated(of: Record) -> set[str]:
    return {violation.invariant for violation in check(of)}


def test_a_run_without_a_fault_violates_nothing():
    assert check(record(outcome(shape="logprobs", scores=PLAIN.max_tokens), outcome(shape="stop"))) == []
    assert check(record(outcome(), outcome(METERED), budgets=(3.0 + METERED.max_tokens, 0.0), admitted=1)) == []


@pytest.mark.parametrize(
    ("changes", "invariant"),
    [
        ({"error": LATE, "ends": 0, "text": ""}, "ends"),
        ({"ends": 2}, "ends"),
        ({"ends": 0}, "ends"),
        ({"late_text": "more"}, "ends"),
        ({"reason": "stop"}, "ends"),
        ({"tokens": None}, "budgets"),
        ({"tokens": (3, PLAIN.max_tokens - 1)}, "budgets"),
        ({"tokens": (0, PLAIN.max_tokens)}, "budgets"),
        ({"text": EXPECTED[PLAIN.text].replace("text", "txt")}, "bytes"),
        ({"text": EXPECTED[PLAIN.text] + "n"}, "bytes"),
        ({"shape": "logprobs", "scores": PLAIN.max_tokens - 1}, "bytes"),
        ({"text": EXPECTED[METERED.text]}, "isolation"),
        ({"error": "Unavailable", "text": ""}, "errors"),
        ({"error": CUT, "ends": 0, "text": ""}, "errors"),
        ({"error": "Malformed"}, "errors"),
    ],
)
def test_each_wrong_stream_is_named(changes: dict, invariant: str):
    assert violated(record(outcome(**changes))) == {invariant}


def test_a_lost_token_is_no_other_tenants_text_where_texts_are_alike():
    alike = EXPECTED | {PLAIN.text: "# The number of the number of the lines", METERED.text: "The number of the lines"}
    lost = outcome(text=alike[PLAIN.text][1:])
    assert violated(dataclasses.replace(record(lost), expected=alike)) == {"bytes"}
    other = outcome(text="The number of the line", error="Unavailable")
    swapped = alike | {PLAIN.text: "def fibonacci(n):"}
    assert violated(dataclasses.replace(record(other), expected=swapped)) == {"isolation", "errors"}


@pytest.mark.parametrize(
    ("error", "tenant", "faults", "is_allowed"),
    [
        (CUT, PLAIN, [(5.5, "kill.worker", "gateway-1")], True),
        (CUT, PLAIN, [(5.5, "kill.gateway", "gateway-2")], False),
        (CUT, PLAIN, [(5.5, "stop.worker", "gateway-1")], True),
        (CUT, PLAIN, [(5.5, "stop.engine", "replica-1")], False),
        (CUT, PLAIN, [(5.5, "kill.engine", "replica-1")], False),
        ("Unavailable", PLAIN, [(5.5, "kill.engine", "replica-1")], False),
        ("Unavailable", PLAIN, [(4.0, "kill.engine", "replica-1"), (5.5, "kill.tritonserver", "replica-2")], True),
        ("Unavailable", METERED, [(4.0, "stop.redis", "redis")], True),
        ("Unavailable", PLAIN, [(4.0, "stop.redis", "redis")], False),
        ("DeadlineExceeded", PLAIN, [(4.0, "stop.engine", "replica-1")], True),
        ("Overloaded", CAPPED, [], False),
        ("Overloaded", CAPPED, [(4.0, "fail.redis.away", "gateway-1")], True),
        ("Overloaded", PLAIN, [], False),
        ("EngineFailed", PLAIN, [(90.0, "kill.engine", "replica-1"), (90.0, "kill.engine", "replica-2")], False),
    ],
)
def test_which_fault_explains_which_error(error: str, tenant, faults: list, is_allowed: bool):
    one = outcome(tenant, error=error, text="", ends=int(error != CUT), tokens=None)
    assert ("errors" in violated(record(one, faults=faults))) is not is_allowed


@pytest.mark.parametrize(
    ("others", "is_allowed"),
    [
        ([outcome(CAPPED)], True),
        ([outcome(CAPPED, ended_s=2.4, sent_s=1.0)], False),
        ([outcome(CAPPED, sent_s=6.1)], False),
        ([outcome(METERED)], False),
        ([outcome(CAPPED, ended_s=2.4, sent_s=1.0)] * CAPPED_REQUESTS, True),  # its requests are used
        ([outcome(CAPPED, error="Overloaded", text="", tokens=None)] * CAPPED_REQUESTS, False),
    ],
)
def test_capped_is_refused_beside_another_of_its_requests_or_after_the_last_one(others: list, is_allowed: bool):
    refused = outcome(CAPPED, error="Overloaded", text="", tokens=None)
    assert ("errors" in violated(record(refused, *others, admitted=40))) is not is_allowed


def test_a_stopped_gateway_breaks_no_stream_that_has_begun():
    one = outcome(error=CUT, text="", ends=0, tokens=None, received=1)
    assert "errors" in violated(record(one, faults=[(5.5, "stop.worker", "gateway-1")]))


def test_budgets_are_exact_but_for_streams_that_broke():
    one, used = outcome(METERED), 3.0 + METERED.max_tokens
    assert violated(record(one, budgets=(used + 5, 0.0))) == {"budgets"}
    assert violated(record(one, budgets=(used - 5, 0.0))) == {"budgets"}
    assert violated(record(one, budgets=(used, 40.0))) == {"budgets"}
    broken = outcome(METERED, error=CUT, text="", ends=0)
    kill = [(5.5, "kill.worker", "gateway-1")]
    assert violated(record(one, broken, budgets=(used, 20.0), faults=kill)) == set()
    assert violated(record(outcome(CAPPED), outcome(CAPPED), budgets=(0.0, 0.0), admitted=1)) == {"budgets"}


def test_capped_gets_no_more_than_its_requests_also_without_redis():
    assert violated(record(outcome(CAPPED), outcome(CAPPED), budgets=None, admitted=1)) == {"budgets"}
    assert violated(record(outcome(CAPPED), outcome(CAPPED), budgets=None, admitted=2)) == set()


@pytest.mark.parametrize(
    ("begun_s", "faults", "is_violated"),
    [
        ([5.1] * 20, [], True),
        ([5.1, 5.2, 5.7], [], True),
        ([5.1, 5.2], [], False),
        ([5.1, 5.2, 5.8], [], False),  # as the first ended
        ([5.1, 5.2, 0.0], [], False),  # was told nothing
        ([5.1] * 20, [(5.0, "fail.redis.away", "gateway-1")], False),
        ([5.1] * 20, [(5.0, "stop.gateway", "gateway-2")], False),
        ([5.1] * 20, [(5.0, "stop.engine", "replica-1")], True),
    ],
)
def test_capped_has_no_more_streams_at_once_than_its_cap(begun_s: list, faults: list, is_violated: bool):
    streams = [outcome(CAPPED, received=1, first_s=at_s) for at_s in begun_s]
    of = record(*streams, faults=faults, admitted=40)
    assert ("budgets" in violated(of)) is is_violated
    assert "budgets" not in violated(dataclasses.replace(of, at_once=20))
    assert "budgets" not in violated(dataclasses.replace(of, redis_late_s=[5.0]))
    assert ("budgets" in violated(dataclasses.replace(of, redis_late_s=[6.5]))) is is_violated


def test_who_leaves_has_a_beginning_and_is_charged_what_the_gateway_counted():
    beginning, most = EXPECTED[METERED.text][:3], len(METERED.text) + METERED.max_tokens
    one = outcome(METERED, error=LEFT, text=beginning, ends=0, received=1, tokens=(3, 2))
    assert check(record(one, budgets=(5.0, 0.0), samples=[])) == []
    assert violated(record(one, budgets=(12.0, 0.0))) == {"budgets"}
    assert violated(record(one, budgets=(0.0, 5.0))) == {"budgets"}  # its permit leaked
    assert violated(record(dataclasses.replace(one, tokens=(3, 0)), budgets=(3.0, 0.0))) == {"budgets"}
    assert violated(record(dataclasses.replace(one, text="else"), budgets=(5.0, 0.0))) == {"bytes"}
    assert violated(record(dataclasses.replace(one, tokens=None), budgets=(float(most), 0.0))) == set()


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"logged": None}, set()),
        ({"logged": (6, PLAIN.max_tokens)}, {"budgets"}),
        ({"logged": (3, 0)}, {"budgets"}),
        ({"logged": (6, PLAIN.max_tokens), "id": "chaos-1-again", "key": "chaos-1"}, set()),
        ({"error": LEFT, "logged": (2, 2)}, set()),
        ({"error": LEFT, "logged": (0, 0)}, set()),  # it had no output
        ({"error": LEFT, "logged": (0, 2)}, {"budgets"}),
        ({"error": LEFT, "logged": (4, 2)}, {"budgets"}),
    ],
)
def test_what_is_logged_is_what_was_told_or_has_the_prompts_tokens(changes: dict, names: set):
    assert violated(record(outcome(**changes))) == names


@pytest.mark.parametrize(
    ("change", "faults", "used", "is_violated"),
    [
        ({}, [], 1, False),
        ({}, [], 2, True),
        ({}, [(5.0, "kill.engine", "replica-1")], 2, True),
        ({}, [(5.0, "fail.redis.away", "gateway-1")], 2, False),
        ({}, [(5.0, "kill.redis", "redis")], 2, False),
        ({"error": CUT, "tokens": None}, [(5.0, "kill.worker", "gateway-1")], 1, False),
    ],
)
def test_a_repeated_request_is_charged_once(change: dict, faults: list, used: int, is_violated: bool):
    first = outcome(METERED, id="chaos-1", key="chaos-1")
    again = outcome(METERED, id="chaos-1-again", key="chaos-1")
    of = record(dataclasses.replace(first, **change), again, faults=faults)
    of.budgets = used * (3.0 + METERED.max_tokens), 0.0
    assert ("budgets" in violated(of)) is is_violated
    assert "budgets" not in violated(dataclasses.replace(of, redis_late_s=[5.5]))
    assert ("budgets" in violated(dataclasses.replace(of, redis_late_s=[7.0]))) is is_violated


def test_the_engine_is_freed_when_callers_leave():
    [long, *_] = (one for one in PROMPTS if one.max_tokens >= LONG)
    left = [outcome(long, error=LEFT, text="", ends=0, received=1, tokens=(3, 2))] * 4
    served = [dataclasses.replace(left[0], tokens=(3, long.max_tokens))]
    short = [outcome(error=LEFT, text="", ends=0, received=1, tokens=(3, PLAIN.max_tokens))]  # it was at its end
    engine = [parse(f'trident_requests_total{{finish_reason="cancelled"}} {count}') for count in (7, 0, 1, 2)]
    samples = [(float(at), WELL | {"replica-1": page}) for at, page in enumerate(engine)]  # it starts again after the 7
    assert violated(record(*left, samples=samples)) == set()
    assert violated(record(*left, samples=samples[:3])) == {"frees"}
    assert violated(record(*left, *served, *short * 9, samples=samples)) == set()
    assert violated(record(*left[:1], *served * 3, samples=samples)) == {"frees"}
    others = [dataclasses.replace(one, protocol="grpc") for one in left]
    assert violated(record(*others, *served * 2, samples=samples)) == {"frees"}
    assert "frees" not in violated(record(*left, samples=samples[:3], faults=[(1.0, "kill.engine", "replica-1")]))


@pytest.mark.parametrize(
    ("changes", "faults", "names"),
    [
        ({"logged_s": 2.4}, [], set()),
        ({"logged_s": 2.6}, [], {"frees"}),
        ({"logged_s": 2.6, "received": 0, "logged": (0, 0)}, [], {"frees"}),  # it was in a queue
        ({"logged_s": 2.6}, [(7.0, "kill.engine", "replica-1")], set()),
        ({"logged_s": 2.6}, [(9.0, "kill.engine", "replica-1")], {"frees"}),
        ({"logged": None}, [], {"frees"}),
        ({"logged": None}, [(5.5, "kill.worker", "gateway-1")], set()),
        ({"logged": None, "received": 0}, [], set()),  # it never arrived
        ({"error": "", "logged_s": 9.0}, [], set()),
    ],
)
def test_each_caller_that_leaves_is_noticed(changes: dict, faults: list, names: set):
    one = outcome(**{"error": LEFT, "received": 1, **changes})
    assert violated(record(one, faults=faults)) == names


def test_a_log_tells_of_no_defect():
    [violation] = check(record(defects=["gateway-1: Task exception was never retrieved: KeyError: 3"]))
    assert violation.invariant == "errors" and violation.detail.endswith("KeyError: 3")


def test_what_is_left_over_is_named():
    leaking = WELL | {"gateway-1": parse("trident_gateway_in_flight 1")}
    [violation] = check(record(samples=[(9.0, leaking)]))
    assert violation.detail == "trident_gateway_in_flight of gateway-1 is 1 and no request is under way"
    assert violated(record(caps=1)) == {"gauges"}
    before = {("gateway-1", 7): (20, 10**8), ("gateway-2", 8): (20, 10**8)}
    after = {("gateway-1", 7): (60, 10**8), ("gateway-2", 9): (90, 10**9)}  # the second was started again
    [violation] = check(record(resources=(before, after)))
    assert violation.detail == "gateway-1 has 40 more descriptors than before the faults"


@pytest.mark.parametrize(
    ("counts", "faults", "is_violated"),
    [
        (("7 2", "7 3", "8 3"), [], False),
        (("7 2", "8 1"), [], True),  # though their sum does not fall
        (("7 2", ""), [], True),
        (("7 2", None, "6 2"), [], True),
        (("7 2", None, "0 2"), [(5.5, "kill.gateway", "gateway-1")], False),
        (("7 2", None, "0 2"), [(5.5, "kill.gateway", "gateway-2")], True),
        (("7 2", None, "0 2"), [(5.5, "kill.worker", "gateway-1")], True),
        (("7 2", "0 2", "0 1"), [(5.5, "kill.gateway", "gateway-1")], True),
        (("7 2", "0 2"), [(4.5, "kill.gateway", "gateway-1")], True),
    ],
)
def test_no_counter_of_a_gateway_falls_while_it_lives(counts: tuple, faults: list, is_violated: bool):
    samples = []
    for at_s, told in enumerate(counts, 5):
        names = ('requests_total{code="200"}', 'tokens_total{tenant="plain"}')
        lines = [f"trident_gateway_{name} {value}" for name, value in zip(names, (told or "").split(), strict=False)]
        page = {} if told is None else {"gateway-1": parse("\n".join(lines))}
        samples.append((float(at_s), {"gateway-2": WELL["gateway-2"], **page}))
    of = record(outcome(), faults=faults, samples=samples)
    assert ("gauges" in violated(of)) is is_violated


@pytest.mark.parametrize(
    ("name", "more_bytes", "names"),
    [
        ("replica-1 tritonserver", 99_000_000, set()),
        ("replica-1 tritonserver", 101_000_000, {"resources"}),
        ("replica-1 python3 -m python_backends.cpu_engine.worker", 260_000_000, set()),
        ("replica-1 python3 -m python_backends.cpu_engine.worker", 371_000_000, {"resources"}),
    ],
)
def test_a_worker_may_fill_its_kv_cache(name: str, more_bytes: int, names: set):
    assert violated(record(resources=({(name, 7): (20, 10**8)}, {(name, 7): (20, 10**8 + more_bytes)}))) == names


def test_recovery_is_bounded():
    kill = [(2.0, "kill.gateway", "gateway-1")]
    dead = [outcome(error=CUT, text="", ends=0, sent_s=3.0 + n, ended_s=3.0 + n) for n in range(8)]
    late = outcome(sent_s=13.0, ended_s=14.0)
    assert "recovery" in violated(record(*dead, late, faults=kill, load_ended_s=14.0, settled_s=14.0))
    assert "recovery" not in violated(record(*dead[:3], outcome(), faults=kill))
    assert "recovery" not in violated(record(*dead, faults=kill, load_ended_s=10.0))  # all within the time of recovery
    assert "recovery" in violated(record(*dead, dataclasses.replace(dead[0], sent_s=12.5, ended_s=12.6), faults=kill))
    assert violated(record(*[outcome(sent_s=99.0, ended_s=99.5)] * 3, load_ended_s=99.0, settled_s=100.0)) == set()
    assert violated(record(settled_s=0.0)) == {"recovery"}
    last = outcome(sent_s=12.5, ended_s=12.6)  # of the load that comes when no fault may be felt
    assert violated(record(*dead[:6], last, faults=kill, load_ended_s=8.0, closing_s=12.4)) == set()
    unserved = dataclasses.replace(dead[0], sent_s=12.5, ended_s=12.6)
    assert violated(record(*dead[:6], unserved, faults=kill, closing_s=12.4)) == {"errors"}
    half_open = WELL | {"gateway-1": parse('trident_gateway_breaker_state{replica="a"} 1')}
    assert violated(record(samples=[(4.0, half_open), (9.0, WELL)])) == set()
    assert violated(record(samples=[(4.0, WELL), (9.0, half_open)])) == {"recovery"}
    assert violated(record(settled_s=19.0)) == {"recovery"}


@pytest.mark.parametrize(
    ("faults", "out", "names"),
    [
        ([3.0], [(3.5, 34.9)], {"recovery"}),
        ([3.0], [(3.5, 8.0), (9.0, 34.9)], {"recovery"}),
        ([3.0], [(3.5, 13.5)], {"recovery"}),
        ([3.0], [(3.5, 12.5)], set()),
        ([3.0], [(3.5, 10.0), (12.5, 14.0)], set()),  # one reading got no answer
        ([3.0], [(3.5, 10.0), (20.0, 24.0)], set()),
        ([3.0, 10.0], [(3.5, 19.5)], set()),
        ([3.0, 10.0], [(3.5, 21.0)], {"recovery"}),
        ([3.0, 15.0], [(3.5, 14.5)], {"recovery"}),
        ([3.0, 15.0], [(3.5, 12.5), (15.5, 24.5)], set()),
    ],
)
def test_the_whole_fleet_is_back_after_each_fault_that_no_other_follows(faults: list, out: list, names: set):
    times = [at / 4 for at in range(150)]
    well_s = [at for at in times if not any(begun <= at < ended for begun, ended in out)]
    kills = [(at, "kill.tritonserver", "replica-1") for at in faults]
    samples = [(at, WELL) for at in times]
    given = {"samples": samples, "well_s": well_s, "load_ended_s": 25.0, "settled_s": 34.9}
    assert violated(record(faults=kills, **given)) == names
    assert violated(record(faults=kills, **given, recovery_s=35.0)) == set()


def test_both_gateways_serve_after_each_fault_that_no_other_follows():
    kills = [(2.0, "kill.gateway", "gateway-1"), (30.0, "kill.gateway", "gateway-1")]
    dead = [outcome(error=CUT, text="", ends=0, sent_s=3.0 + n, ended_s=3.0 + n) for n in range(9)]
    late, last = outcome(sent_s=20.0, ended_s=21.0), outcome(sent_s=30.0, ended_s=31.0)
    given = {"faults": kills, "load_ended_s": 32.0, "settled_s": 33.0}
    assert violated(record(*dead, late, last, **given)) == {"recovery"}
    assert violated(record(*dead, outcome(sent_s=9.0, ended_s=11.0), last, **given)) == set()


@pytest.mark.parametrize(
    ("faults", "is_named"),
    [
        ([], True),
        ([(2.0, "kill.supervisor", "replica-1")], False),
        ([(2.0, "kill.supervisor", "replica-2")], True),
        ([(2.0, "fail.disk.slow", "replica-1")], True),
        ([(7.0, "kill.supervisor", "replica-1")], True),
    ],
)
def test_a_fault_that_could_not_be_done_is_named(faults: list, is_named: bool):
    missed = Happened(Fault(5.0, "kill.engine", "replica-1"), 5.0, 5.0)
    assert ("faults" in violated(record(missed=[missed], faults=faults))) is is_named


def test_fewer_replicas_than_the_floor_are_named():
    low = WELL | {"scaler": parse('trident_scaler_wanted{pool=""} 1')}
    assert violated(record(samples=[(4.0, low), (9.0, WELL)])) == {"floor"}
    assert violated(record(samples=[(9.0, WELL | {"scaler": parse("trident_scaler_other 2")})])) == {"floor"}
    told = WELL | {"scaler": parse('trident_scaler_wanted{pool=""} 2')}
    assert violated(record(samples=[(9.0, told)])) == set()


def test_alerts_fire_and_clear():
    out = WELL | {"gateway-1": parse('trident_gateway_replica_healthy{replica="a"} 0')}
    samples = [(float(at), out if 2 <= at < 8 else WELL) for at in range(10)]
    assert invariants.spans(samples, "replica") == [("gateway-1 a", 2.0, 8.0)]
    assert violated(record(samples=samples, alerts={})) == {"alerts"}
    assert violated(record(samples=samples, alerts={"TridentReplicaOut gateway-1 a": [(5.0, 8.0)]})) == set()
    assert violated(record(samples=samples)) == set()  # without Prometheus
    assert violated(record(alerts={}, alerts_left=["TridentQueueGrows"])) == {"alerts"}
    gone = {"gateway-2": WELL["gateway-2"]}
    assert invariants.spans([(1.0, WELL), (2.0, gone), (3.0, gone)], "gateway") == [("gateway-1", 2.0, 3.0)]


def test_an_alert_is_that_of_its_process():
    gone = {"gateway-2": WELL["gateway-2"]}
    samples = [(float(at), gone if 2 <= at < 8 else WELL) for at in range(10)]
    assert violated(record(samples=samples, alerts={"TridentGatewayDown gateway-2": [(5.0, 8.0)]})) == {"alerts"}
    assert violated(record(samples=samples, alerts={"TridentGatewayDown gateway-1": [(5.0, 8.0)]})) == set()


@pytest.mark.parametrize(
    ("unread", "names"),
    [
        ({}, {"alerts"}),
        ({"gateway-1": [(0.0, 1.5), (4.0, 4.0), (9.0, 9.0)]}, set()),
        ({"gateway-1": [(3.0, 6.0)]}, set()),
        ({"gateway-1": [(2.5, 3.0)]}, {"alerts"}),
        ({"gateway-1": [(0.0, 3.0), (7.9, 9.0)]}, {"alerts"}),
        ({"gateway-2": [(4.0, 4.0)]}, {"alerts"}),
    ],
)
def test_a_replica_that_is_out_is_told_as_long_as_the_gateway_can_be_read(unread: dict, names: set):
    out = WELL | {"gateway-1": parse('trident_gateway_replica_healthy{replica="a"} 0')}
    samples = [(float(at), out if 2 <= at < 8 else WELL) for at in range(10)]
    assert violated(record(samples=samples, alerts={}, unread=unread)) == names


def test_stored_responses_are_their_tenants():
    assert violated(record(stored=[(4.0, "reading got 200: must be 404")])) == {"isolation"}
