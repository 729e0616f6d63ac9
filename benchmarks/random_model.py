"""Build an engine from a random Llama of about 160 million parameters: the cost of a small real model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from benchmarks import checkpoints
from benchmarks.server_process import ENGINES, ROOT

NAME = "bench-160m"
CHECKPOINT = ROOT / ".cache" / "bench" / NAME
VOCABULARY = 32_000
CONFIG = checkpoints.CONFIGS["llama_gqa"] | {
    "vocab_size": VOCABULARY,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
SPECIALS = {"eos_token_id": VOCABULARY - 2, "bos_token_id": VOCABULARY - 1}


def parameters(config: dict = CONFIG) -> int:
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn + 2 * hidden
    return 2 * config["vocab_size"] * hidden + config["num_hidden_layers"] * layer + hidden


def engine(precision: str = "bf16") -> str:
    """Return the name of the engine, built if needed, which takes some ten seconds."""
    if not (CHECKPOINT / "model.safetensors").exists():
        checkpoints.write(CHECKPOINT, CONFIG | SPECIALS)
        write_tokenizer(CHECKPOINT)
    name = NAME if precision == "bf16" else f"{NAME}-{precision}"
    command = [sys.executable, "-m", "build.engine", "--engine", name, "--model", str(CHECKPOINT)]
    subprocess.run([*command, "--precision", precision], cwd=ROOT, check=True, stdout=sys.stderr)
    return name


def folder(precision: str = "bf16") -> Path:
    return ENGINES / engine(precision)


def write_tokenizer(into: Path) -> None:
    """Write a byte-level BPE tokenizer of VOCABULARY tokens, so that every generated id has a text.

    The merges are all pairs of lower-case letters, then pairs of those, with and without a space in front.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pairs = [(first, second) for first in ["Ġ", *letters] for second in letters]
    twos = [first + second for first, second in pairs]
    for first in twos:
        for second in twos[26:]:
            if len(alphabet) + len(pairs) >= VOCABULARY - 2:
                break
            pairs.append((first, second))
    vocabulary = {token: n for n, token in enumerate([*alphabet, *("".join(pair) for pair in pairs)])}
    tokenizer = Tokenizer(BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|begin|>"])
    tokenizer.save(str(into / "tokenizer.json"))
    settings = json.loads((into / "tokenizer_config.json").read_text())
    (into / "tokenizer_config.json").write_text(json.dumps(settings))
