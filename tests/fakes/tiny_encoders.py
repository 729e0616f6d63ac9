"""Tiny random checkpoints of encoders, complete enough to build and serve an engine from."""

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece

from build.base.encoder_checkpoint import BERT_RERANK, _bert
from build.base.json_fields import Fields
from tests.fakes import checkpoints

WORDS = "a b c the man eats food is eating of on and no yes ping second in with quick fox".split()
BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_act": "gelu",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
RERANKER = BERT | {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
ROBERTA_RERANKER = RERANKER | {
    "architectures": ["XLMRobertaForSequenceClassification"],
    "model_type": "xlm-roberta",
    "type_vocab_size": 1,
    "pad_token_id": 1,
    "max_position_embeddings": 66,
}
QWEN3 = checkpoints.CONFIGS["qwen3"] | {"tie_word_embeddings": True, "rope_parameters": None}


def write_bert(folder: Path, config: dict, seed: int = 0) -> Path:
    """A checkpoint of BERT's family with its tokenizer, its tensors named as transformers names them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    name = config["architectures"][0]
    rerank = name in BERT_RERANK
    arch = _bert(Fields(config, "config.json"), name, rerank)
    random = np.random.default_rng(seed)
    prefix = ("roberta." if "Roberta" in arch.name else "bert.") if rerank else ""
    weights = {}
    for tensor, shape in arch.expected_tensors().items():
        values = random.standard_normal(shape).astype(np.float32) * (0.3 if len(shape) == 2 else 0.1)
        if "LayerNorm.weight" in tensor:
            values += 1
        weights[tensor if tensor.startswith("classifier") else f"{prefix}{tensor}"] = values
    if not rerank:  # which an embedding model carries along and does not read
        weights |= {
            "pooler.dense.weight": np.zeros((32, 32), np.float32),
            "pooler.dense.bias": np.zeros(32, np.float32),
        }
    checkpoints.write_weights(folder, weights, dtype="F32")
    write_word_pieces(folder)
    return folder


def write_word_pieces(folder: Path) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocab = {word: number for number, word in enumerate([*special, *WORDS, *(f"##{letter}" for letter in "abcdefgh")])}
    tokenizer = Tokenizer(WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(special)
    pair = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", pair)
    tokenizer.enable_truncation(8)  # as published tokenizers have it; serving decides for itself
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_sentence_files(folder: Path, pooling: str = "mean_tokens", *, normalize: bool = True, **sentences) -> Path:
    """What sentence-transformers keeps beside a checkpoint. sentences: of config_sentence_transformers.json."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [{"type": f"sentence_transformers.models.{k}", "path": p} for k, p in zip(kinds, paths, strict=False)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {
        f"pooling_mode_{name}": name == pooling for name in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    }
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32} | modes))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 32, "do_lower_case": False}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(sentences))
    return folder


def write_qwen3(folder: Path, *, bare: bool = False) -> Path:
    """A tiny Qwen3 with words for answers. bare: tensors without ``model.``, as Qwen3-Embedding has them."""
    weights = checkpoints.write(folder, QWEN3)
    if bare:
        checkpoints.write_weights(folder, {n.removeprefix("model."): w for n, w in weights.items()})
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["no", "yes"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
