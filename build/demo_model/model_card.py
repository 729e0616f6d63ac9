"""The demo model's card: README.md of the checkpoint, made from card.md, training.json and evaluation.json alone."""

from pathlib import Path
from typing import Any

CARD = Path(__file__).with_name("card.md")


def sample_section(sample: dict[str, Any]) -> str:
    """One completion as a fenced block; the prompt stands in the block and, quoted, above it."""
    how = "Greedy" if sample["temperature"] == 0 else f"Temperature {sample['temperature']}, seed 0"
    return f"{how}, after `{sample['prompt']!r}`:\n\n```\n{sample['prompt']}{sample['completion']}\n```\n"


def ending(training: dict[str, Any]) -> str:
    """How the run ended: a clock that ran out leaves a learning rate above zero, which a reader should know."""
    steps, taken = training["steps"], training["steps_taken"]
    if taken == steps:
        return "The run took all of them."
    left = (steps - taken) / (steps - training["decay_from"])
    return f"The clock ended the run there, at {left:.0%} of the full learning rate."


def model_card(training: dict[str, Any], evaluation: dict[str, Any]) -> str:
    """Markdown with HuggingFace's front matter; the arguments are the contents of training.json and evaluation.json."""
    shape = training["architecture"]
    return CARD.read_text(encoding="utf-8").format(
        training=training,
        evaluation=evaluation,
        shape=shape,
        held_out_modules=len(evaluation["held_out_modules"]),
        context_bytes=shape["max_position_embeddings"] * evaluation["held_out_bytes_per_token"],
        head_dim=shape["hidden_size"] // shape["num_attention_heads"],
        ending=ending(training),
        epochs=training["steps_taken"] * training["batch_tokens"] / training["training_tokens"],
        minutes=training["seconds"] / 60,
        samples="\n".join(map(sample_section, evaluation["samples"])),
        held_out_names=", ".join(f"`{name}`" for name in evaluation["held_out_modules"]),
    )
