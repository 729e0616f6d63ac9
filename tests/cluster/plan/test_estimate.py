"""Estimates for cards that are not here."""

from __future__ import annotations

import pytest

from cluster.plan import estimate
from cluster.plan.scenario import Accelerator
from contract.errors import InvalidArgument
from tests.cluster.plan.scenarios import table

GIVEN = table()["pools"]["main"]["estimate"]


def test_a_roofline_reads_the_weights_in_every_step_and_says_that_it_is_an_estimate():
    found = estimate.replica(Accelerator(**GIVEN), "x")
    assert found.step.estimated and found.step.source == "roofline" and found.step.machine == "1 x h100"
    assert found.step.step_s == pytest.approx(16e9 / (3.35e12 * 0.7) + estimate.LAUNCH_S)
    assert found.step.context_token_s == pytest.approx(2 * 32 * 8 * 128 * 2 / (3.35e12 * 0.7))
    assert found.kv_tokens == int(0.9 * (79 - 16) * 1e9 / (2 * 32 * 8 * 128 * 2))
    half = estimate.replica(Accelerator(**GIVEN | {"weight_bytes": 1}), "x")
    assert half.step.step_s < found.step.step_s and half.kv_tokens > found.kv_tokens


def test_published_throughputs_are_met():
    given = Accelerator(**GIVEN | {"published": "llama3.1-8b", "weight_bytes": 1, "kv_bytes": 1})
    found = estimate.replica(given, "x")
    assert found.step.source == "published" and found.step.error_p95_percent < 25
    assert estimate.full_load(found.step, found.kv_tokens, 1000, 1000) == pytest.approx(15244.78, rel=0.25)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"card": "h101"}, "x.card: must be one of a100-80gb, "),
        ({"parameters": 70.0}, "x.cards: must hold 140 GB of weights and a KV cache beside them"),
        ({"published": "gpt"}, "x.published: has no throughputs for 1 x h100"),
        ({"card": "b200", "published": "llama3.1-8b"}, "x.published: has no throughputs for 1 x b200"),
    ],
)
def test_what_cannot_be_estimated_is_refused(change, problem):
    with pytest.raises(InvalidArgument, match=problem):
        estimate.replica(Accelerator(**GIVEN | change), "x")
