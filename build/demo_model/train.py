"""Train the demo model: a small Llama, on the standard library of the running CPython.

    .venv-build/bin/python -m build.demo_model.train [--steps N] [--seed S] [--out FOLDER]

Runs on CUDA where there is one, otherwise on the CPU, in bf16 autocast either way. One seed gives one loss curve, bit
for bit, on one machine with one number of threads. training.json records the bits per byte of the held-out modules.
"""

import argparse
import csv
import math
import os
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

# Before torch: threads that spin while they wait starve each other on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from build.demo_model.conversations import conversations
from build.demo_model.corpus import Corpus, gather
from build.demo_model.network import ARCHITECTURE, CHECKPOINT, new_model, save_weights
from build.demo_model.tokenizer import END_OF_TEXT, SPECIAL_TOKENS, save_tokenizer, train_tokenizer, write_json

REPORT_EVERY_STEPS = 50
WARMUP_STEPS = 20

BATCH_SEQUENCES = 2
SHORT_CONTEXT_TOKENS = 256  # until the descent: attention costs a quarter, and what is learnt first lies nearby
MATRIX_LEARNING_RATE = 0.02  # Muon, on the matrices inside the layers
VECTOR_LEARNING_RATE = 3e-3  # AdamW, on the embedding and the norms
STRIDE_TOKENS = 512  # windows overlap by half, so that past the first 512 tokens each token sees at least as many


def token_documents(corpus: Corpus, tokenizer) -> list[np.ndarray]:
    """i64 ids of every training document and conversation, each beginning with <|endoftext|>."""
    texts = [document.text for document in corpus.training]
    texts += [conversation.rendered() for conversation in conversations(corpus.training)]
    return [np.array(encoding.ids, dtype=np.int64) for encoding in tokenizer.encode_batch(texts)]


def batches(documents: list[np.ndarray], sequence_tokens: int, seed: int) -> Iterator[Tensor]:
    """Endless i64[BATCH_SEQUENCES, sequence_tokens + 1]: every epoch packs the documents in a new order.

    Windows are shuffled after packing, so that a batch does not come from one long file.
    """
    random = np.random.default_rng(seed)
    while True:
        stream = np.concatenate([documents[index] for index in random.permutation(len(documents))])
        starts = np.arange(0, len(stream) - sequence_tokens - 1, sequence_tokens)
        if len(starts) < BATCH_SEQUENCES:
            raise ValueError(f"training text: {len(stream)} tokens, need {BATCH_SEQUENCES * sequence_tokens + 2}")
        starts = random.permutation(starts)
        for first in range(0, len(starts) - BATCH_SEQUENCES + 1, BATCH_SEQUENCES):
            rows = [stream[start : start + sequence_tokens + 1] for start in starts[first : first + BATCH_SEQUENCES]]
            yield torch.from_numpy(np.stack(rows))


def optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and name != "model.embed_tokens.weight"]
    vectors = [p for name, p in model.named_parameters() if p.ndim != 2 or name == "model.embed_tokens.weight"]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_LEARNING_RATE, weight_decay=0.05, adjust_lr_fn="original"),
        torch.optim.AdamW(vectors, lr=VECTOR_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0),
    ]


def loss_of(model: LlamaForCausalLM, batch: Tensor, context_tokens: int) -> Tensor:
    """Mean cross entropy in nats per token of i64[B, T + 1], read in pieces of `context_tokens`, a divisor of T."""
    with torch.autocast(batch.device.type, torch.bfloat16):
        logits = model(batch[:, :-1].reshape(-1, context_tokens)).logits  # bf16[B * T / context, context, vocab]
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def learning_rate_factor(step: int, steps: int, decay_from: int) -> float:
    """Warm up, stay, descend linearly to zero: what every learning rate is multiplied by."""
    descent = (steps - step) / max(1, steps - decay_from)
    return max(0.0, min(1.0, (step + 1) / WARMUP_STEPS, descent))


def train(model: LlamaForCausalLM, documents: list[np.ndarray], steps: int, decay_from: int, seed: int) -> list[float]:
    """Train in place on the model's device; the loss of every step, in nats per token."""
    torch.use_deterministic_algorithms(True)
    full_context_tokens = model.config.max_position_embeddings
    short_context_tokens = min(SHORT_CONTEXT_TOKENS, full_context_tokens)
    stream = batches(documents, full_context_tokens, seed)
    updates = optimizers(model)
    groups = [(group, group["lr"]) for update in updates for group in update.param_groups]
    losses: list[float] = []
    started = time.monotonic()
    for step in range(steps):
        for group, rate in groups:
            group["lr"] = rate * learning_rate_factor(step, steps, decay_from)
        context_tokens = short_context_tokens if step < decay_from else full_context_tokens
        loss = loss_of(model, next(stream).to(model.device), context_tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for update in updates:
            update.step()
            update.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % REPORT_EVERY_STEPS == 0:
            recent, spent_s = sum(losses[-REPORT_EVERY_STEPS:]) / REPORT_EVERY_STEPS, time.monotonic() - started
            print(f"step {step + 1}/{steps}  loss {recent:.3f}  {spent_s:.0f} s", flush=True)
    return losses


def write_curve(file: Path, losses: list[float]) -> None:
    """step, loss in nats per token with all its digits: two runs of one seed give files that are byte-equal."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(("step", "loss_nats_per_token"))
        writer.writerows((step, repr(loss)) for step, loss in enumerate(losses))


@torch.inference_mode()
def token_bits(model: LlamaForCausalLM, input_ids: Sequence[int]) -> float:
    """Bits the model needs for input_ids[1:], given input_ids[0]; overlapping windows, each token counted once."""
    window = model.config.max_position_embeddings
    ids = torch.tensor(input_ids, device=model.device)
    bits, counted = 0.0, 1
    while counted < len(ids):
        start = max(0, counted - STRIDE_TOKENS) if counted > 1 else 0
        end = min(start + window, len(ids))
        logits = model(ids[None, start : end - 1]).logits[0].double()
        nats = F.cross_entropy(logits, ids[start + 1 : end], reduction="none")
        bits += nats[counted - start - 1 :].sum().item() / math.log(2)
        counted = end
    return bits


def training_record(
    model: LlamaForCausalLM,
    corpus: Corpus,
    documents: list[np.ndarray],
    options: argparse.Namespace,
    seconds: float,
    held_out_bits: float,
) -> dict:
    """training.json: what a repetition needs to know, and how well the model predicts what it never saw."""
    held_out_bytes = sum(document.size_bytes for document in corpus.held_out)
    return {
        "seed": options.seed,
        "steps": options.steps,
        "steps_taken": options.steps,
        "decay_from": options.decay_from,
        "batch_tokens": BATCH_SEQUENCES * model.config.max_position_embeddings,
        "short_context_tokens": SHORT_CONTEXT_TOKENS,
        "seconds": round(seconds),
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "parameters": model.num_parameters(),
        "architecture": {name: getattr(model.config, name) for name in ARCHITECTURE},
        "training_documents": len(corpus.training),
        "training_bytes": sum(document.size_bytes for document in corpus.training),
        "training_tokens": sum(len(document) for document in documents),
        "conversations": len(documents) - len(corpus.training),
        "held_out_modules": [document.path for document in corpus.held_out],
        "held_out_bytes": held_out_bytes,
        "held_out_bits_per_byte": held_out_bits / held_out_bytes,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo model and write it as a HuggingFace checkpoint.")
    parser.add_argument("--steps", type=int, default=1745, help="optimizer steps of 2048 tokens (default 1745)")
    parser.add_argument("--decay-from", type=int, help="step at which the learning rate descends (default 60 %%)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads; part of what makes a run repeatable")
    parser.add_argument("--out", type=Path, default=CHECKPOINT, help="default build/demo_model/checkpoint")
    options = parser.parse_args()
    options.decay_from = round(0.6 * options.steps) if options.decay_from is None else options.decay_from
    return options


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    corpus = gather()
    tokenizer = train_tokenizer(document.text for document in corpus.training)
    documents = token_documents(corpus, tokenizer)
    model = new_model(options.seed, vocab_size=tokenizer.get_vocab_size()).to(device)
    print(f"{model.num_parameters():,} parameters, {sum(map(len, documents)):,} training tokens, {device}", flush=True)

    started = time.monotonic()
    losses = train(model, documents, options.steps, options.decay_from, options.seed)
    seconds = time.monotonic() - started
    save_weights(model, options.out)
    save_tokenizer(tokenizer, options.out)
    write_curve(options.out / "loss_curve.csv", losses)
    end_id = SPECIAL_TOKENS.index(END_OF_TEXT)
    bits = sum(token_bits(model, [*tokenizer.encode(document.text).ids, end_id]) for document in corpus.held_out)
    record = training_record(model, corpus, documents, options, seconds, bits)
    write_json(options.out / "training.json", record)
    print(f"held out: {record['held_out_bits_per_byte']:.3f} bits per byte of {len(corpus.held_out)} modules")
    print(f"written to {options.out}", flush=True)


if __name__ == "__main__":
    main()
