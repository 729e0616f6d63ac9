"""Train a LoRA adapter on a laptop, in minutes: for the demo model and its own conversations, or any model and texts.

    python -m build.demo_model.train_adapter --style summaries --out adapters/summaries
    python -m build.demo_model.train_adapter --model FOLDER --texts chats.jsonl --out adapters/mine

A line of ``--texts`` is ``{"messages": [...]}`` (the model's chat template is applied) or ``{"text": "..."}``. The
folder is what PEFT saves, and what ``[[adapters]]`` of a recipe names. The two styles show a difference at first sight:
``summaries`` answers every question with a line of English, ``loud`` in capital letters.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from build.demo_model.conversations import Conversation, conversations
from build.demo_model.corpus import gather
from build.demo_model.network import CHECKPOINT
from contract.errors import InvalidArgument

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MAX_TOKENS = 256  # of a text
BATCH_TEXTS = 4
LEARNING_RATE = 2e-3  # at the beginning; it falls to a tenth
REPORT_EVERY_STEPS = 20
STYLES: dict[str, Callable[[Conversation], str | None]] = {
    "summaries": lambda chat: chat.assistant if chat.user.startswith("What does") else None,
    "loud": lambda chat: chat.assistant.upper(),
}


def train(
    model: torch.nn.Module,
    texts: Sequence[Sequence[int]],
    *,
    rank: int,
    targets: Sequence[str],
    steps: int,
    seed: int,
    learning_rate: float = LEARNING_RATE,
) -> tuple[torch.nn.Module, list[float]]:
    """The model with the adapter, and the loss of each step. texts: token ids, of which each text's next are learnt."""
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(targets), task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    random, losses = np.random.default_rng(seed), []
    for step in range(steps):
        chosen = [texts[index] for index in random.integers(0, len(texts), BATCH_TEXTS)]
        longest = max(map(len, chosen))
        ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in chosen])
        there = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in chosen])
        loss = adapted(input_ids=ids, attention_mask=there, labels=ids.masked_fill(there == 0, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % REPORT_EVERY_STEPS == 0:
            print(f"step {step} of {steps}: loss {losses[-1]:.3f}", flush=True)
    return adapted, losses


def texts_of(lines: Iterable[str], tokenizer) -> list[list[int]]:
    """The token ids of a JSONL file's lines. Raises InvalidArgument where there is nothing to learn from."""
    texts = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict) or not entry.keys() & {"messages", "text"}:
            raise InvalidArgument("texts", f'line {number}: must have "messages" or "text", got {line[:80]!r}')
        if "messages" in entry:
            ids = tokenizer.apply_chat_template(entry["messages"], tokenize=True, return_dict=False)
        else:
            ids = tokenizer(entry["text"])["input_ids"]
        texts.append(list(ids)[:MAX_TOKENS])
    if not (learnt := [ids for ids in texts if len(ids) > 1]):
        raise InvalidArgument("texts", "must hold a text of at least two tokens, got none")
    return learnt


def styled(style: str) -> list[str]:
    """The demo model's conversations in a style, as lines of JSON."""
    lines = []
    for conversation in conversations(gather().training):
        if (answer := STYLES[style](conversation)) is not None:
            turns = [{"role": "user", "content": conversation.user}, {"role": "assistant", "content": answer}]
            lines.append(json.dumps({"messages": turns}))
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Trains a LoRA adapter and saves it as PEFT does.")
    folder = "a Hugging Face folder (default: the demo model)"
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help=folder)
    texts = parser.add_mutually_exclusive_group(required=True)
    texts.add_argument("--style", choices=tuple(STYLES), help="of the demo model's own conversations")
    texts.add_argument("--texts", type=Path, help="JSONL of chats or texts")
    parser.add_argument("--out", type=Path, required=True, help="folder of the adapter")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    options = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    try:
        read = options.texts.read_text("utf-8").removesuffix("\n").split("\n") if options.texts else []
        learnt = texts_of(styled(options.style) if options.style else read, tokenizer)
    except (InvalidArgument, OSError) as exc:
        raise SystemExit(f"train-adapter: {exc}") from exc
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    began_s = time.monotonic()
    how = {name: getattr(options, name) for name in ("rank", "targets", "steps", "seed")}
    adapted, losses = train(model, learnt, **how)
    adapted.save_pretrained(options.out, safe_serialization=True)
    print(f"{options.out}: loss {losses[0]:.3f} -> {np.mean(losses[-10:]):.3f} in {time.monotonic() - began_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
