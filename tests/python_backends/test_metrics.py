import pytest

from contract import manifest
from contract.errors import Overloaded
from python_backends import metrics
from python_backends.metrics import AdapterMetrics, Metrics
from python_backends.triton_io import metric_family


@pytest.fixture
def metrics_of_model(triton):
    return Metrics(metric_family)


def test_nothing_reaches_the_server_before_flush(metrics_of_model, triton):
    add = metrics_of_model.counter("tokens_total", "Tokens", model="m")
    add(2)
    assert triton.metric_value("tokens_total", model="m") == 0
    metrics_of_model.flush()
    assert triton.metric_value("tokens_total", model="m") == 2
    metrics_of_model.flush()
    assert triton.metric_value("tokens_total", model="m") == 2


def test_a_counter_adds_one_unless_told_otherwise(metrics_of_model, triton):
    add = metrics_of_model.counter("requests_total", "Requests")
    add()
    add(3)
    metrics_of_model.flush()
    assert triton.metric_value("requests_total") == 4


def test_a_flush_is_one_call_for_each_counter_that_grew(metrics_of_model, triton):
    add, other = (metrics_of_model.counter("tokens_total", "Tokens", model=name) for name in "ab")
    for value in (2, 3, 0):
        add(value)
    other(0)
    metrics_of_model.flush()
    family = triton.families["tokens_total"]
    assert family.Metric({"model": "a"}).calls == [5] and not family.Metric({"model": "b"}).calls


def test_a_gauge_set_to_what_it_shows_is_not_sent_again(metrics_of_model, triton):
    show = metrics_of_model.gauge("running", "Requests", kind="a")
    for value in (1, 1, 2, 2, 1, 1):
        show(value)
        metrics_of_model.flush()
    assert triton.families["running"].Metric({"kind": "a"}).calls == [1, 2, 1]


def test_gauges_of_a_flush_that_failed_are_sent_by_the_next(metrics_of_model, triton, monkeypatch):
    show, add = metrics_of_model.gauge("running", "Requests"), metrics_of_model.counter("requests_total", "Requests")
    monkeypatch.setattr(triton.families["requests_total"].Metric({}), "increment", lambda value: 1 / 0)
    show(3)
    add()
    with pytest.raises(ZeroDivisionError):
        metrics_of_model.flush()
    show(3)
    metrics_of_model.flush()
    assert triton.metric_value("running") == 3


def test_gauges_are_sent_after_the_counters_with_their_last_value(metrics_of_model, triton, monkeypatch):
    sent = []
    show, add = metrics_of_model.gauge("running", "Requests"), metrics_of_model.counter("requests_total", "Requests")
    for name, how in (("running", "set"), ("requests_total", "increment")):
        metric = triton.families[name].Metric(labels={})
        monkeypatch.setattr(metric, how, lambda value, name=name: sent.append((name, value)))
    show(1)
    add()
    show(0)
    metrics_of_model.flush()
    assert sent == [("requests_total", 1), ("running", 0)]


def test_gauges_of_one_family_do_not_shadow_each_other(metrics_of_model, triton):
    first, second = (
        metrics_of_model.gauge("running", "Requests", kind="a"),
        metrics_of_model.gauge("running", "Requests", kind="b"),
    )
    first(5)
    second(5)
    metrics_of_model.flush()
    assert triton.metric_value("running", kind="a") == triton.metric_value("running", kind="b") == 5


def test_a_histogram_has_growing_buckets_of_floats_and_sees_every_value(metrics_of_model, triton):
    observe = metrics_of_model.histogram("seconds", "Time", (1, 2.5), model="m")
    for value in (0.1, 2, 9):
        observe(value)
    metrics_of_model.flush()
    assert triton.families["seconds"].Metric({"model": "m"}, [1.0, 2.5]).calls == [0.1, 2, 9]


def test_one_name_and_its_labels_are_one_metric_however_often_it_is_asked_for(metrics_of_model, triton):
    metrics_of_model.counter("tokens_total", "Tokens", model="m", version="1")(1)
    metrics_of_model.counter("tokens_total", "Tokens", version="1", model="m")(1)
    metrics_of_model.flush()
    assert triton.metric_value("tokens_total", model="m", version="1") == 2


def test_what_waits_for_a_flush_is_bounded_and_the_newest_is_kept(metrics_of_model, triton, monkeypatch):
    observe = metrics_of_model.histogram("seconds", "Time", (1.0,))
    for value in range(metrics._MAX_PENDING + 10):
        observe(value)
    metrics_of_model.flush()
    calls = triton.families["seconds"].Metric({}, [1.0]).calls
    assert calls == list(range(10, metrics._MAX_PENDING + 10))


@pytest.mark.parametrize("buckets", [metrics.TTFT_BUCKETS, metrics.TPOT_BUCKETS, metrics.DURATION_BUCKETS])
def test_our_buckets_are_what_a_histogram_takes(metrics_of_model, buckets):
    metrics_of_model.histogram("seconds", "Time", buckets)(0.5)
    metrics_of_model.flush()


def test_sends_are_counted_by_cause(triton):
    metrics = Metrics(metric_family)
    adapters = AdapterMetrics(metrics, ("poet", "lawyer"), model="engine")
    for cause in ("first", "", "again", "again"):
        adapters.accepted("poet", cause)
    metrics.flush()
    counts = [
        triton.metric_value("trident_adapter_sends_total", model="engine", adapter=name, cause=cause)
        for name in ("poet", "lawyer")
        for cause in ("first", "again")
    ]
    assert counts == [1, 2, 0, 0]


def test_errors_are_counted_by_their_class_and_those_without_one_are_shown_as_none(metrics_of_model, triton):
    count = metrics_of_model.errors(model="m")
    count(Overloaded("full"))
    metrics_of_model.flush()
    assert triton.metric_value("trident_errors_total", model="m", error_type="Overloaded") == 1
    assert triton.metric_value("trident_errors_total", model="m", error_type="NotFound") == 0


def test_the_engine_is_named_with_the_digest_of_its_manifest(metrics_of_model, triton, tiny_engine):
    made = manifest.load(tiny_engine)
    metrics_of_model.show_engine(tiny_engine, made)
    metrics_of_model.flush()
    digest = manifest.sha256_file(tiny_engine / "manifest.json")
    labels = {"engine": made.name, "kind": "cpu", "manifest_sha256": digest}
    assert triton.metric_value("trident_engine_info", **labels) == 1
