"""What a request costs is exact, and never more than what was reserved for the same tokens."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal

from hypothesis import given
from hypothesis import strategies as st

from contract.generation import Usage
from gateway.admission.charge import FREE, Charge
from gateway.config.policy import ModelPrice
from gateway.config.tenant import Level

PRICES = st.decimals(0, 100, places=6).map(float)
TOKENS = st.integers(0, 10**6)


@given(PRICES, PRICES, PRICES, TOKENS, TOKENS, TOKENS)
def test_money_is_exact_and_rounded_once(
    input_: float, cached: float, output: float, prompt: int, hits: int, tokens: int
) -> None:
    charge, hits = Charge(price=ModelPrice(input=input_, cached=cached, output=output)), min(hits, prompt)
    parts = (input_, prompt - hits), (cached, hits), (output, tokens)
    exact = sum(Decimal(repr(price)) * count for price, count in parts) * 1000
    micros = charge.micros(Usage(prompt, tokens, hits))
    assert micros == int(exact.quantize(Decimal(1), ROUND_HALF_UP))
    assert micros <= charge.most_micros(prompt, tokens)


def test_cached_tokens_are_told_only_where_they_have_a_price() -> None:
    usage, levels = Usage(10, 5, 4), (Level("a"), Level("a/b"), Level("a/b/c"))
    told = Charge("r", "demo", "chat", ModelPrice(input=1.0, cached=0.5)).record(1.0, levels, usage)
    assert (told.key, told.prompt_tokens, told.cached_tokens, told.micros) == ("a/b/c", 10, 4, 8000)
    assert Charge(price=ModelPrice(input=1.0)).record(1.0, levels, usage)[-3:] == (0, 5, 10_000)
    assert FREE.record(1.0, (), None)[-4:] == (0, 0, 0, 0)
