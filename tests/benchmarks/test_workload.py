import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.arrivals import Arrival, Poisson, Trace
from benchmarks.lengths import Fixed, LogNormal
from benchmarks.prompts import Prompts
from benchmarks.workload import Workload
from contract.errors import InvalidArgument
from tests.fakes.tokenizer_families import FAMILIES

PROMPTS = Prompts()


@given(seed=st.integers(0, 1000), index=st.integers(0, 10**6))
def test_a_request_depends_on_seed_and_index_alone(seed, index):
    load = Workload(4, None, LogNormal(20, 0.5, 60), LogNormal(20, 0.5), 2, 5, 0.5, seed=seed)
    first = load.request(index, PROMPTS)
    load.request(index + 1, PROMPTS)
    assert load.request(index, PROMPTS) == first
    assert 1 <= (first.cancel_after_tokens or 1) <= first.max_tokens


def test_other_seeds_and_other_numbers_are_other_requests():
    load = Workload(4)
    prompts = {dataclasses.replace(load, seed=seed).request(n, PROMPTS).prompt for seed in range(3) for n in range(20)}
    assert len(prompts) == 60


def test_the_share_of_cancelled_requests_is_the_given_one():
    load = Workload(4, cancel_fraction=0.25)
    requests = [load.request(n, PROMPTS) for n in range(2000)]
    assert 0.2 < sum(request.cancel_after_tokens is not None for request in requests) / 2000 < 0.3


def test_prompts_share_the_given_number_of_prefixes():
    load = Workload(4, None, Fixed(30), prefix_groups=3, prefix_tokens=20)
    prompts = [load.request(n, PROMPTS).prompt.split() for n in range(60)]
    assert len({tuple(words[:20]) for words in prompts}) == 3
    assert all(len(words) == 30 for words in prompts)


def test_a_trace_s_lengths_replace_the_drawn_ones():
    load = Workload(arrivals=Poisson(1), input_tokens=Fixed(9), output_tokens=Fixed(9))
    request = load.request(0, PROMPTS, Arrival(2.5, 17, 33))
    assert (len(request.prompt.split()), request.max_tokens) == (17, 33)


@pytest.mark.parametrize("family", FAMILIES)
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
        ({}, "concurrency: exactly one of"),
        ({"concurrency": 1, "arrivals": Poisson(1)}, "concurrency: exactly one of"),
        ({"concurrency": 0}, "concurrency: must be a whole number from 1 to "),
        ({"concurrency": 1, "cancel_fraction": 1.5}, "cancel_fraction: must be between 0 and 1, got 1.5"),
        ({"concurrency": 1, "prefix_groups": 2}, "prefix_groups: must be, as prefix_tokens, above 0, .* got 2 and 0"),
        ({"concurrency": 1, "prefix_groups": -1}, "prefix_groups: must be, as prefix_tokens, .* got -1 and 0"),
        ({"concurrency": 1, "prefix_groups": 2, "prefix_tokens": 128}, "prefix_tokens: must be fewer .* 128.* got 128"),
    ],
)
def test_loads_that_make_no_sense_are_refused_by_name(options, named):
    with pytest.raises(InvalidArgument, match=f"^{named}"):
        Workload(**options)


def test_fixed_lengths_that_an_engine_never_takes_are_refused():
    for load in (Workload(1, None, Fixed(300), Fixed(212)), Workload(1, None, LogNormal(900, 0.5), Fixed(511))):
        load.check_fits(512)
    for sizes, problem in (
        ((Fixed(512), LogNormal(9, 0.5)), "input: must be at most 511 tokens, as prompt .* 512 "),
        ((Fixed(300), Fixed(213)), "output: must be at most 212 tokens with 300 of input, .*, got 213"),
        ((LogNormal(9, 0.5), Fixed(512)), "output: must be at most 511 tokens with 1 of input"),
    ):
        with pytest.raises(InvalidArgument, match=f"^{problem}"):
            Workload(1, None, *sizes).check_fits(512)
    Workload(None, Trace((Arrival(0.0, 9, 9),)), Fixed(900)).check_fits(512)  # it has lengths of its own
