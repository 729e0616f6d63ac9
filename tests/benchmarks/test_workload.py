import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.arrivals import Arrival, Poisson
from benchmarks.lengths import Fixed, LogNormal
from benchmarks.prompts import Prompts
from benchmarks.tokenizer_families import FAMILIES
from benchmarks.workload import Workload
from contract.errors import InvalidArgument

PROMPTS = Prompts()


@given(seed=st.integers(0, 1000), index=st.integers(0, 10**6))
def test_a_request_is_the_same_whoever_asks_for_it_and_in_whatever_order(seed, index):
    load = Workload(4, None, LogNormal(20, 0.5, 60), LogNormal(20, 0.5), 2, 5, {"a": 1, "b": 3}, 0.5, seed=seed)
    first = load.request(index, PROMPTS)
    load.request(index + 1, PROMPTS)
    assert load.request(index, PROMPTS) == first
    assert 1 <= (first.leave_after_tokens or 1) <= first.max_tokens


def test_other_seeds_and_other_numbers_are_other_requests():
    load = Workload(4)
    prompts = {load.with_seed(seed).request(n, PROMPTS).prompt for seed in range(3) for n in range(20)}
    assert len(prompts) == 60


def test_shares_of_tenants_and_of_callers_who_leave_are_those_asked_for():
    load = Workload(4, tenants={"a": 1, "b": 3}, cancel_fraction=0.25)
    asked = [load.request(n, PROMPTS) for n in range(2000)]
    assert 0.7 < sum(one.tenant == "b" for one in asked) / 2000 < 0.8
    assert 0.2 < sum(one.leave_after_tokens is not None for one in asked) / 2000 < 0.3


def test_prompts_share_one_of_so_many_prefixes():
    load = Workload(4, None, Fixed(30), prefix_groups=3, prefix_tokens=20)
    asked = [load.request(n, PROMPTS).prompt.split() for n in range(60)]
    assert len({tuple(words[:20]) for words in asked}) == 3
    assert all(len(words) == 30 for words in asked)


def test_a_trace_s_lengths_and_tenant_win():
    load = Workload(arrivals=Poisson(1), input_tokens=Fixed(9), output_tokens=Fixed(9), tenants={"a": 1})
    asked = load.request(0, PROMPTS, Arrival(2.5, 17, 33, "trace"))
    assert (len(asked.prompt.split()), asked.max_tokens, asked.tenant, asked.at_s) == (17, 33, "trace", 2.5)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=15)
@given(seed=st.integers(0, 1000), tokens=st.integers(3, 80))
def test_with_a_tokenizer_prompts_have_the_tokens_asked_for(family, seed, tokens):
    tokenizer = TOKENIZERS.setdefault(family, FAMILIES[family]())
    prompts = Prompts(tokenizer)
    text = prompts.text(random.Random(seed), tokens)
    assert prompts.count(text) <= tokens
    assert prompts.count(text) >= tokens - 2  # a cut may take a whole word's tokens


TOKENIZERS: dict = {}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "concurrency: set exactly one"),
        ({"concurrency": 1, "arrivals": Poisson(1)}, "concurrency: set exactly one"),
        ({"concurrency": 0}, "concurrency: got 0"),
        ({"concurrency": 1, "cancel_fraction": 1.5}, "cancel_fraction: got 1.5"),
        ({"concurrency": 1, "prefix_groups": 2}, "prefix_groups: .*go together"),
        ({"concurrency": 1, "tenants": {"a": 0}}, "tenants: .*weights above 0"),
    ],
)
def test_loads_that_make_no_sense_are_refused_by_name(options, named):
    with pytest.raises(InvalidArgument, match=f"^{named}"):
        Workload(**options)
