"""The demo model's card: made from the recorded figures alone."""

import json
from pathlib import Path

from build.demo_model.model_card import model_card

CHECKPOINT = Path(__file__).resolve().parents[3] / "build/demo_model/checkpoint"


def read(name):
    return json.loads((CHECKPOINT / name).read_text())


def test_the_card_is_the_one_these_figures_make_and_shows_them():
    card, figures = (CHECKPOINT / "README.md").read_text(), read("evaluation.json")
    assert card == model_card(read("training.json"), figures)
    assert f"**{figures['model_bits_per_byte']:.3f}**" in card
    for word in ("PSF-2.0", "make demo-model", "def fibonacci(n):", "seed 0", *figures["held_out_modules"]):
        assert word in card
