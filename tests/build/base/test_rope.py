"""Frequencies against values worked out by hand or from the defining property of each scaling."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from build.base.json_fields import BadField
from build.base.rope import from_config, inverse_frequencies

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}


def frequencies(head_dim: int = 64, **config: object) -> np.ndarray:
    return inverse_frequencies(from_config({"max_position_embeddings": 8192} | config), head_dim)[0]


def test_the_first_pair_turns_one_radian_per_token_and_the_last_almost_theta_times_slower():
    plain = frequencies(64, rope_theta=10_000.0)
    assert plain[0] == 1.0 and plain.dtype == np.float32 and plain.shape == (32,)
    assert plain[31] == pytest.approx(10_000.0 ** (-62 / 64))


def test_both_spellings_of_the_config_mean_the_same():
    old = frequencies(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    new = frequencies(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5})
    np.testing.assert_array_equal(old, new)


@given(factor=st.floats(1.0, 64.0), theta=st.floats(100.0, 1e7))
def test_linear_scaling_divides_every_frequency(factor, theta):
    scaled = frequencies(rope_theta=theta, rope_scaling={"type": "linear", "factor": factor})
    np.testing.assert_allclose(scaled * factor, frequencies(rope_theta=theta), rtol=1e-6)


@given(factor=st.floats(1.5, 32.0), original=st.integers(64, 8192))
def test_llama3_keeps_fast_waves_stretches_slow_ones_and_stays_between(factor, original):
    plain = frequencies(128, rope_theta=5e5)
    block = LLAMA3 | {"factor": factor, "original_max_position_embeddings": original}
    scaled = frequencies(128, rope_theta=5e5, rope_scaling=block)
    turns = original * plain / (2 * math.pi)
    np.testing.assert_allclose(scaled[turns > 4], plain[turns > 4], rtol=1e-6)
    np.testing.assert_allclose(scaled[turns < 1], plain[turns < 1] / factor, rtol=1e-6)
    assert (scaled <= plain * 1.000001).all() and (scaled >= plain / factor * 0.999999).all()


def test_yarn_keeps_fast_waves_stretches_slow_ones_and_raises_the_temperature():
    plain = frequencies(128)
    rope = from_config({"rope_scaling": YARN | {"original_max_position_embeddings": 4096}})
    scaled, factor = inverse_frequencies(rope, 128)
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1] / 4)
    assert factor == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_takes_an_attention_factor_as_given():
    rope = from_config({"max_position_embeddings": 4096, "rope_scaling": YARN | {"attention_factor": 1.25}})
    assert inverse_frequencies(rope, 64)[1] == 1.25


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2}},
            "rope type 'dynamic' is not supported; supported are default",
        ),
        (
            {"rope_scaling": {"type": "linear"}},
            "rope type 'linear' needs a positive number 'factor'; config.json has None",
        ),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "config.json has -1"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "needs high_freq_factor > low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ],
)
def test_what_is_not_supported_is_said(config, says):
    with pytest.raises(BadField) as caught:
        frequencies(**config)
    assert says in str(caught.value)
