"""Estimates for cards that are not here."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path

import pytest

from cluster.plan import estimate
from cluster.plan.estimate import Accelerator
from cluster.plan.replica import Request, forecast
from contract.errors import InvalidArgument
from tests.cluster.plan.scenarios import table

GIVEN = table()["pools"]["main"]["estimate"] | {"max_batch_size": 256}
MEASURED = json.loads((Path(__file__).parent / "h100_steps.json").read_text("utf-8"))["models"]


def test_a_roofline_reads_the_weights_in_every_step_and_says_that_it_is_an_estimate():
    found = estimate.replica(Accelerator(**GIVEN), "x")
    assert found.step.estimated and found.step.source == "roofline" and found.step.machine == "1 x h100"
    bytes_per_s, fixed_s = 3.35e12 * estimate.BANDWIDTH, estimate.LAUNCH_S + 32 * estimate.LAYER_S
    assert found.step.step_s == pytest.approx(16e9 / bytes_per_s + fixed_s)
    assert found.step.context_token_s == pytest.approx(2 * 32 * 8 * 128 * 2 / bytes_per_s)
    assert found.kv_tokens == int(0.9 * (79 - 16) * 1e9 / (2 * 32 * 8 * 128 * 2))
    half = estimate.replica(Accelerator(**GIVEN | {"weight_bytes": 1}), "x")
    assert half.step.step_s < found.step.step_s and half.kv_tokens > found.kv_tokens


def test_few_tokens_are_computed_while_the_weights_are_read_and_many_take_their_own_time():
    step = estimate.replica(Accelerator(**GIVEN), "x").step
    assert step.seconds(8, 0, 100) == pytest.approx(step.step_s)
    operations_s = 8000 * 16e9 / (989e12 * estimate.COMPUTE)
    assert step.seconds(0, 0, 8000) == pytest.approx(operations_s + estimate.LAUNCH_S + 32 * estimate.LAYER_S)


@pytest.mark.parametrize("model", MEASURED)
def test_steps_measured_on_one_h100_are_met(model):
    """Without LAUNCH_S, since no engine was measured, and without the small model's prompts: the attention within a
    prompt, which takes more than half of them, is no part of the estimate."""
    step = estimate.replica(Accelerator(card="h100", **MEASURED[model]["accelerator"]), "x").step
    errors = sorted(
        abs((step.seconds(sequences, sequences * context, prompt) - estimate.LAUNCH_S) / (milliseconds / 1000) - 1)
        for sequences, context, prompt, milliseconds in MEASURED[model]["steps"]
        if not (prompt and "SmolLM2" in model)
    )
    assert len(errors) > 15 and statistics.median(errors) < 0.08 and errors[-1] < 0.2


@pytest.mark.parametrize("row", range(5))
def test_latencies_published_of_one_h100_behind_triton_are_met_from_little_to_much_load(row):
    table = json.loads(estimate.ANCHORS.read_text("utf-8"))["triton_online_v0.14"]
    rate, _, _, itl_ms, _, _ = table["llama3.1-8b tp1"][row]
    tokens, rng, at_s, requests = table["conditions"], random.Random(1), 0.0, []
    for _ in range(300):
        at_s += rng.expovariate(rate)
        requests.append(Request(at_s, tokens["input_tokens"], tokens["output_tokens"]))
    found = forecast(estimate.replica(Accelerator(**GIVEN), "x"), requests)
    assert found.itl_mean_s == pytest.approx(itl_ms / 1000, rel=0.15)


@pytest.mark.parametrize(("size", "cards", "layers"), [("8", 1, 32), ("70", 2, 80), ("70", 4, 80), ("70", 8, 80)])
def test_published_throughputs_are_met_within_a_quarter_without_being_fitted(size, cards, layers):
    given = {"cards": cards, "layers": layers, "parameters": float(size), "weight_bytes": 1, "kv_bytes": 1}
    found = estimate.replica(Accelerator(**GIVEN | given), "x")
    for lengths, known in estimate._published(f"llama3.1-{size}b", "h100", cards).items():
        assert estimate.full_load(found.step, found.kv_tokens, *lengths) == pytest.approx(known, rel=0.25)


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
        ({"max_num_tokens": 500_000}, r"x.max_num_tokens: must be at most 432586, as the KV cache .*, got 500000"),
        ({"published": "gpt"}, "x.published: must be one of llama3.1-8b for 1 x h100, got 'gpt'"),
        ({"card": "b200", "published": "llama3.1-8b"}, 'x.published: must be left out or "" for 1 x b200, got'),
    ],
)
def test_what_cannot_be_estimated_is_refused(change, problem):
    with pytest.raises(InvalidArgument, match=problem):
        estimate.replica(Accelerator(**GIVEN | change), "x")


def test_the_page_names_every_field_and_every_card():
    text = (Path(__file__).resolve().parents[3] / "docs" / "capacity.md").read_text("utf-8")
    _, _, rows = text.partition("| field of `[pools.NAME.estimate]` |")
    rows, _, _ = rows.partition("\n\n")
    for name in [*Accelerator.model_fields, *estimate.CARDS]:
        assert f"`{name}`" in rows
