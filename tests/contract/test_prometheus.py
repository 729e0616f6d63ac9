"""The one parser of the Prometheus text format."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from contract.prometheus import Metrics, parse

SCRAPE = """\
# HELP nv_inference_count Number of inferences
# TYPE nv_inference_count counter
nv_inference_count{model="engine",version="1"} 5
nv_inference_count{model="engine",version="2"} 2
nv_inference_count{model="tokenizer",version="1"} 9 1700000000000

up 1
"""


def test_values_are_summed_over_the_samples_that_match():
    metrics = parse(SCRAPE)
    assert metrics.value("nv_inference_count") == 16
    assert metrics.value("nv_inference_count", model="engine") == 7
    assert metrics.value("nv_inference_count", model="none") == metrics.value("missing") == 0
    assert metrics.by_label("nv_inference_count", "model") == {"engine": 7, "tokenizer": 9}
    assert "up" in metrics and "missing" not in metrics


def test_only_the_named_prefixes_are_parsed():
    metrics = parse(SCRAPE + "not a sample at all!\n", ("nv_",))
    assert "up" not in metrics and metrics.value("nv_inference_count", version="2") == 2


@pytest.mark.parametrize("line", ["nv{a=1} 2", 'nv{a="1" 2', "nv", "nv many", '{a="1"} 2', 'nv{a="1"} 1 2 3'])
def test_a_line_that_is_not_a_sample_is_an_error(line: str):
    with pytest.raises(ValueError):
        parse(f"{line}\n")


def test_an_empty_scrape_has_no_samples():
    assert parse("") == Metrics({}) == Metrics()


@given(st.dictionaries(st.text(max_size=12), st.floats(allow_nan=False), max_size=4))
def test_what_prometheus_client_writes_reads_as_its_own_parser_does(values: dict[str, float]):
    registry = CollectorRegistry()
    gauge = Gauge("trident_test", "help", ["label"], registry=registry)
    for label, value in values.items():
        gauge.labels(label).set(value)
    text = generate_latest(registry).decode()
    expected = [
        (sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "trident_test"
    ]
    assert list(parse(text).matching("trident_test")) == expected
