"""The demo model's card: README.md of the checkpoint, made from training.json and evaluation.json alone."""

from typing import Any

CARD = """---
language: [en, code]
license: other
license_name: PSF-2.0
license_link: https://docs.python.org/3/license.html
library_name: transformers
pipeline_tag: text-generation
tags: [llama, python, demo]
---

# Trident's demo model

A language model of {parameters:,} parameters that continues Python. It exists so that the serving path can be shown and
tested on any machine with a model that has something to say; it is far too small to be relied on for code or facts.

## Held-out bits per byte

{held_out_modules} modules of the standard library ({held_out_bytes:,} bytes) were kept out of training: whole files,
chosen by a hash of their path. Less is better.

| | bits per byte |
|---|---|
| **this model** | **{bits_per_byte:.3f}** |
| xz -9e, primed with the whole training text | 1.388 |
| order-5 byte n-gram, kneser-ney, same training text | 1.710 |
| xz -9e, all held-out modules in one stream | 1.784 |
| order-5 byte n-gram, witten-bell, same training text | 1.822 |
| gzip -9, all held-out modules in one stream | 2.048 |
| gzip -9, primed with 32 KiB of training text (its window) | 2.089 |
| xz -9e, each module alone | 2.136 |
| gzip -9, each module alone | 2.199 |

The figures below the model's were measured once, on the 34 held-out modules of CPython 3.11.7, and are not measured
again. The model and the n-grams code each module alone and also its end; the model sees at most {context:,} tokens
(about {context_bytes:,.0f} bytes) of it at a time. *Primed* compressors have already read training text, as much as
their window holds: xz all of it, gzip 32 KiB. The weights measured are the bf16 ones of this folder, computed in f32.

## Architecture

LlamaForCausalLM: {layers} layers, hidden size {hidden}, SwiGLU of {intermediate}, {heads} query heads over
{kv_heads} key/value heads of {head_dim}, rotary positions (theta {rope_theta:.0f}), RMSNorm, one matrix for embedding
and output, {context:,} positions, weights in bf16.

Tokenizer: byte-level BPE of {vocabulary:,} tokens, trained on the training modules; {bytes_per_token:.2f} bytes per
token on the held-out ones. A line break with its indentation is one token. `<|endoftext|>` begins and ends every
document (bos and eos); the chat template writes `<|system|>`, `<|user|>` and `<|assistant|>` turns that end with
`<|end|>`.

## Data and licence

The standard library of CPython {python}: {documents:,} documents, {training_bytes:,} bytes; with {conversations:,}
short question-and-answer examples made from the docstrings of the same modules, {training_tokens:,} tokens. Left out
are `test` folders, installed packages, character tables and machine-written files; `build/demo_model/corpus.py` says
exactly what.

CPython and its documentation are under the Python Software Foundation License Version 2, which permits derived works
on condition that its notice is kept: *Copyright (c) 2001-2023 Python Software Foundation; All Rights Reserved.*
A few modules carry further notices of their authors, listed with that licence. The weights and the tokenizer are
offered under the same terms.

## Recipe

Muon on the layers' matrices, AdamW on the embedding and the norms; linear warm-up, plateau, linear descent from step
{decay_from:,} of {steps:,}; {batch_tokens:,} tokens a step, in pieces of {short_context} until the descent and of
{context:,} from there; {steps_taken:,} steps taken ({epochs:.1f} epochs), seed {seed}; bf16 autocast, f32 weights.
{ending} `loss_curve.csv` has the loss of every step.

This run: {device}, {threads} threads, PyTorch {torch}, {minutes:.0f} minutes.

Retrain with `make demo-model`, that is `python -m build.demo_model.train`; `python -m build.demo_model.evaluate`
measures once more and writes this card anew. The same seed, threads, PyTorch and machine type give the same curve, byte
for byte. To repeat this very run:

    python -m build.demo_model.train --seed {seed} --steps {steps} --decay-from {decay_from} \\
        --threads {threads} --minutes 600

## Samples

Not selected: fixed prompts, fixed seeds.

{samples}
## Held-out modules

{held_out_names}
"""


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
    return (
        f"The clock ended the run there, at {left:.0%} of the full learning rate; the repetition below goes on to the\n"
        f"end, its first {taken:,} losses being the same."
    )


def model_card(training: dict[str, Any], evaluation: dict[str, Any]) -> str:
    """Markdown with HuggingFace's front matter; the arguments are the contents of training.json and evaluation.json."""
    shape = training["architecture"]
    return CARD.format(
        parameters=training["parameters"],
        held_out_modules=len(evaluation["held_out_modules"]),
        held_out_bytes=evaluation["held_out_bytes"],
        bits_per_byte=evaluation["model_bits_per_byte"],
        context=shape["max_position_embeddings"],
        context_bytes=shape["max_position_embeddings"] * evaluation["held_out_bytes_per_token"],
        layers=shape["num_hidden_layers"],
        hidden=shape["hidden_size"],
        intermediate=shape["intermediate_size"],
        heads=shape["num_attention_heads"],
        kv_heads=shape["num_key_value_heads"],
        head_dim=shape["hidden_size"] // shape["num_attention_heads"],
        rope_theta=shape["rope_theta"],
        vocabulary=shape["vocab_size"],
        bytes_per_token=evaluation["held_out_bytes_per_token"],
        python=training["python"],
        documents=training["training_documents"],
        training_bytes=training["training_bytes"],
        conversations=training["conversations"],
        training_tokens=training["training_tokens"],
        decay_from=training["decay_from"],
        steps=training["steps"],
        steps_taken=training["steps_taken"],
        batch_tokens=training["batch_tokens"],
        short_context=training["short_context_tokens"],
        ending=ending(training),
        epochs=training["steps_taken"] * training["batch_tokens"] / training["training_tokens"],
        seed=training["seed"],
        device=training["device"],
        threads=training["threads"],
        torch=training["torch"],
        minutes=training["seconds"] / 60,
        samples="\n".join(map(sample_section, evaluation["samples"])),
        held_out_names=", ".join(f"`{name}`" for name in evaluation["held_out_modules"]),
    )
