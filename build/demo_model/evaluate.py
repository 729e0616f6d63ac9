"""Measure the demo model on the modules it was not trained on, and write its card.

    python -m build.demo_model.evaluate [--checkpoint FOLDER]

Writes evaluation.json (the figures) and README.md (the card, from evaluation.json and training.json) into the
checkpoint's folder.
"""

import argparse
import json
import math
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from build.demo_model.conversations import Conversation
from build.demo_model.corpus import Corpus, Document, gather
from build.demo_model.model_card import model_card
from build.demo_model.network import load_weights
from build.demo_model.tokenizer import END_OF_TEXT, END_OF_TURN, write_json

CHECKPOINT = Path(__file__).resolve().parent / "checkpoint"
STRIDE_TOKENS = 512  # windows overlap by half, so that past the first 512 tokens each token sees at least as many
COMPLETION_PROMPTS = ("def fibonacci(n):", "class Stack:\n    def __init__(self):", "import os\n\ndef ")
QUESTIONS = ("What does `copytree` do?", "Write `def read_lines(path):`")
COMPLETION_TOKENS = 96


@torch.inference_mode()
def token_bits(model: LlamaForCausalLM, input_ids: Sequence[int]) -> float:
    """Bits the model needs for input_ids[1:], given input_ids[0]; overlapping windows, each token counted once."""
    window = model.config.max_position_embeddings
    ids = torch.tensor(input_ids)
    bits, counted = 0.0, 1
    while counted < len(ids):
        start = max(0, counted - STRIDE_TOKENS) if counted > 1 else 0
        end = min(start + window, len(ids))
        log_probs = F.log_softmax(
            model(ids[None, start : end - 1]).logits[0].double(), dim=-1
        )  # f64[end - start - 1, vocab]
        nats = -log_probs.gather(1, ids[start + 1 : end, None]).squeeze(1)
        bits += nats[counted - start - 1 :].sum().item() / math.log(2)
        counted = end
    return bits


def model_bits_per_byte(model: LlamaForCausalLM, tokenizer: Tokenizer, documents: Sequence[Document]) -> float:
    """Mean over all bytes of the documents, each scored alone with its final <|endoftext|>."""
    end_id = tokenizer.token_to_id(END_OF_TEXT)
    bits = sum(token_bits(model, [*tokenizer.encode(document.text).ids, end_id]) for document in documents)
    return bits / sum(document.size_bytes for document in documents)


@torch.inference_mode()
def completion(model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, temperature: float = 0.0) -> str:
    """Text that follows `prompt`: greedy at temperature 0, else sampled; ends at <|endoftext|> or <|end|>."""
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    torch.manual_seed(0)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    mask = torch.ones_like(ids)
    made = model.generate(ids, attention_mask=mask, max_new_tokens=COMPLETION_TOKENS, use_cache=True, **sampling)
    return tokenizer.decode(made[0, ids.shape[1] :].tolist(), skip_special_tokens=True)


def samples(model: LlamaForCausalLM, tokenizer: Tokenizer) -> list[dict]:
    """Prompt, settings and completion of the card's examples, from fixed seeds."""
    found = []
    for prompt in COMPLETION_PROMPTS:
        for temperature in (0.0, 0.7):
            text = completion(model, tokenizer, prompt, temperature)
            found.append({"prompt": prompt, "temperature": temperature, "completion": text})
    for question in QUESTIONS:
        prompt = Conversation("", question, "").rendered().removesuffix(END_OF_TURN)
        text = completion(model, tokenizer, prompt)
        found.append({"prompt": prompt, "temperature": 0.0, "completion": text})
    return found


def evaluate(folder: Path, corpus: Corpus) -> dict:
    """The contents of evaluation.json; bits per byte are over the held-out bytes."""
    model, tokenizer = load_weights(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    held_out_bytes = sum(document.size_bytes for document in corpus.held_out)
    print(f"held out: {len(corpus.held_out)} modules, {held_out_bytes:,} bytes", flush=True)
    started = time.monotonic()
    ours = model_bits_per_byte(model, tokenizer, corpus.held_out)
    print(f"model: {ours:.3f} bits per byte ({time.monotonic() - started:.0f} s)", flush=True)
    tokens = sum(len(tokenizer.encode(document.text, add_special_tokens=False).ids) for document in corpus.held_out)
    return {
        "held_out_modules": [document.path for document in corpus.held_out],
        "held_out_bytes": held_out_bytes,
        "held_out_bytes_per_token": held_out_bytes / tokens,
        "model_bits_per_byte": ours,
        "samples": samples(model, tokenizer),
    }


def write_card(folder: Path, corpus: Corpus) -> None:
    """Evaluate the checkpoint in `folder`; write evaluation.json and README.md beside it.

    Raises ValueError where `corpus` holds out other modules than the training run did.
    """
    record = json.loads((folder / "training.json").read_text())
    if [document.path for document in corpus.held_out] != record["held_out_modules"]:
        raise ValueError(
            f"held-out modules differ from those of the training run: it used CPython {record['python']}, this is "
            f"{platform.python_version()}, so it may have been trained on what would be measured here"
        )
    figures = evaluate(folder, corpus)
    write_json(folder / "evaluation.json", figures)
    (folder / "README.md").write_text(model_card(record, figures))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the demo model and write its model card.")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="folder that train.py wrote")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    write_card(options.checkpoint, gather())
    print(f"written to {options.checkpoint}")


if __name__ == "__main__":
    main()
