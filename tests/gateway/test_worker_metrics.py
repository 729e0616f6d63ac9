"""Pages of workers become one page: what is counted adds up, what all see alike stays."""

import functools

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.worker_metrics import WorkerMetrics


def page(requests: int, in_flight: int, times: list[float], slots: int = 8, cost: float = 0.0) -> str:
    registry = CollectorRegistry()
    Counter("trident_gateway_requests", "Help.", ("code",), registry=registry).labels("200").inc(requests)
    Gauge("trident_gateway_in_flight", "Help.", registry=registry).set(in_flight)
    Gauge("trident_gateway_pool_slots", "Help.", ("pool",), registry=registry).labels('a"b\\').set(slots)
    Gauge("trident_gateway_cost_per_1000_tokens", "Help.", ("currency",), registry=registry).labels("USD").set(cost)
    calls = Counter("trident_gateway_pool_calls", "Help.", ("pool",), registry=registry)
    calls.labels("p").inc(requests)
    Gauge("trident_gateway_release_weight", "Help.", ("release",), registry=registry).labels("r").set(25)
    histogram = Histogram("gen_ai_server_x_seconds", "Help.", buckets=(0.1, 1.0), registry=registry)
    for one in times:
        histogram.observe(one)
    return generate_latest(registry).decode()


def samples(text: str) -> dict[str, float]:
    families = text_string_to_metric_families(text)
    return {
        sample.name + "".join(sample.labels.values()): sample.value for family in families for sample in family.samples
    }


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.lists(st.floats(0, 2), max_size=4)), min_size=1))
def test_counters_histograms_and_own_gauges_add_up_and_shared_ones_do_not(workers):
    merged = WorkerMetrics()
    for number, (requests, in_flight, times) in enumerate(workers):
        merged.read(number, page(requests, in_flight, times))
    found, every = samples(merged.page().decode()), [one for *_, times in workers for one in times]
    assert found["trident_gateway_requests_total200"] == sum(requests for requests, *_ in workers)
    assert found["trident_gateway_in_flight"] == sum(in_flight for _, in_flight, _ in workers)
    assert found['trident_gateway_pool_slotsa"b\\'] == 8
    assert found["trident_gateway_pool_calls_totalp"] == sum(requests for requests, *_ in workers)
    assert found["trident_gateway_release_weightr"] == 25
    assert found["gen_ai_server_x_seconds_count"] == len(every)
    assert found["gen_ai_server_x_seconds_bucket0.1"] == sum(one <= 0.1 for one in every)


@given(st.lists(st.text(), min_size=1, max_size=5), st.lists(st.floats(), min_size=1, max_size=3))
def test_labels_and_values_of_any_kind_are_those_of_the_workers(labels, values):
    merged = WorkerMetrics()
    for number, value in enumerate(values):
        registry = CollectorRegistry()
        gauge = Gauge("trident_gateway_pool_x", "Any \\ line\nof help.", ("one", "other"), registry=registry)
        for label in labels:
            gauge.labels(label, f" {label}}} 1").set(value)
        merged.read(number, generate_latest(registry).decode())
    [family] = [f for f in text_string_to_metric_families(merged.page().decode()) if f.name == "trident_gateway_pool_x"]
    assert family.documentation == "Any \\ line\nof help." and family.type == "gauge"
    assert {sample.labels["one"] for sample in family.samples} == set(labels)
    for sample in family.samples:
        assert sample.labels["other"] == f" {sample.labels['one']}}} 1"
        assert repr(sample.value) == repr(functools.reduce(max, values))


def test_a_worker_that_ended_leaves_its_counters_and_takes_its_gauges():
    merged = WorkerMetrics()
    merged.read(0, page(5, 3, [0.5]))
    merged.read(1, page(7, 2, []))
    merged.end(0)
    merged.end(0)
    merged.read(0, page(1, 1, [0.5]))
    found = samples(merged.page().decode())
    assert found["trident_gateway_requests_total200"] == 13 and found["trident_gateway_in_flight"] == 3
    assert found["gen_ai_server_x_seconds_count"] == 2


def test_a_worker_that_does_not_answer_is_named_and_keeps_its_figures():
    merged = WorkerMetrics()
    merged.read(0, page(5, 3, []))
    merged.read(1, page(7, 2, []))
    merged.read(1, None)
    found = samples(merged.page().decode())
    assert found["trident_gateway_requests_total200"] == 12
    assert found["trident_gateway_worker_up0"] == 1 and found["trident_gateway_worker_up1"] == 0
    merged.read(1, page(8, 2, []))
    assert samples(merged.page().decode())["trident_gateway_worker_up1"] == 1


def test_the_cost_of_a_token_counts_the_tokens_of_all():
    merged = WorkerMetrics()
    merged.read(0, page(0, 0, [], cost=6.0))  # 10 for 1667 tokens
    merged.read(1, page(0, 0, [], cost=3.0))  # 10 for 3333 tokens
    merged.read(2, page(0, 0, [], cost=0.0))
    assert samples(merged.page().decode())["trident_gateway_cost_per_1000_tokensUSD"] == 2.0


def test_a_counter_began_when_it_did_in_the_first_worker():
    merged, pages = WorkerMetrics(), [page(1, 0, []), page(1, 0, [])]
    for number, one in enumerate(pages):
        merged.read(number, one)
    found, each = samples(merged.page().decode()), [samples(one) for one in pages]
    names = [name for name in each[0] if "_created" in name]
    assert len(names) == 3
    assert all(found[name] == min(one[name] for one in each) for name in names)
