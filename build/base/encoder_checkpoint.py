"""A checkpoint that turns texts into vectors or scores: BERT's family, or a decoder trained for it (Qwen3-Embedding).

Read as sentence-transformers reads it: modules.json, 1_Pooling/config.json, config_sentence_transformers.json and
sentence_bert_config.json where they are there; without modules.json the mean of all tokens, as it is. Where they set no
longest text it is the tokenizer's model_max_length.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from build.base import architecture as architectures
from build.base import digest
from build.base.architecture import Architecture
from build.base.checkpoint import TOKENIZER_FILES, check_tokenizer, files_of, read_json, read_tensors
from build.base.json_fields import BadField, CheckpointError, Fields, read_object, shown
from build.base.shards import StoredTensor
from contract.encoder import EMBEDDING, RERANK, Encoder

BERT = ("BertModel", "XLMRobertaModel", "RobertaModel")
BERT_RERANK = tuple(f"{name[:-5]}ForSequenceClassification" for name in BERT)
MASKED = tuple(f"{name[:-5]}ForMaskedLM" for name in BERT)  # their own head is not read
# A decoder saved without its head, as sentence-transformers saves it, and the same with one.
HEADLESS = {name.replace("ForCausalLM", "Model"): name for name in architectures.SUPPORTED}
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
SENTENCE_FILES = """
    modules.json config_sentence_transformers.json sentence_bert_config.json 1_Pooling/config.json
""".split()
_POOLINGS = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
# Older releases write a switch for each.
_POOLINGS |= {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "last"}
_ACTIVATIONS = {"Sigmoid": True, "Identity": False}  # whether a reranker's logit goes through the sigmoid
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# The template of Qwen3-Reranker's model card; without it its scores are close to random.
_QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    "<Instruct>: INSTRUCTION\n<Query>: {query}\n<Document>: {document}",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)


@dataclass(frozen=True)
class BertArchitecture:
    """A post-norm encoder with absolute positions. first_position: of the first token (RoBERTa: after the padding's).
    max_positions: the longest sequence. rerank: whether a classifier of one label follows."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_positions: int
    first_position: int
    token_types: int
    eps: float
    activation: str
    rerank: bool
    tied: bool = False

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the graph reads, without the prefix, with its shape."""
        hidden, ffn = self.hidden_size, self.intermediate_size
        tensors: dict[str, tuple[int, ...]] = {
            "embeddings.word_embeddings.weight": (self.vocab_size, hidden),
            "embeddings.position_embeddings.weight": (self.max_positions + self.first_position, hidden),
            "embeddings.token_type_embeddings.weight": (self.token_types, hidden),
        }
        linears: dict[str, tuple[int, int]] = {}
        norms = ["embeddings.LayerNorm"]
        for layer in range(self.num_layers):
            at = f"encoder.layer.{layer}"
            linears |= {f"{at}.attention.self.{what}": (hidden, hidden) for what in ("query", "key", "value")}
            linears[f"{at}.attention.output.dense"] = (hidden, hidden)
            linears[f"{at}.intermediate.dense"] = (ffn, hidden)
            linears[f"{at}.output.dense"] = (hidden, ffn)
            norms += [f"{at}.attention.output.LayerNorm", f"{at}.output.LayerNorm"]
        if self.rerank:
            linears |= dict(zip(self.head, ((hidden, hidden), (1, hidden)), strict=True))
        for name in norms:
            tensors |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
        for name, (rows, columns) in linears.items():
            tensors |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
        return tensors

    @property
    def head(self) -> tuple[str, str]:
        """The two linear layers of the classifier; tanh stands between them."""
        roberta = "Roberta" in self.name
        return ("classifier.dense", "classifier.out_proj") if roberta else ("pooler.dense", "classifier")

    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.expected_tensors().values())


@dataclass(frozen=True)
class EncoderCheckpoint:
    """encoder: what serving needs to know. max_seq_len: the model's own limit. sigmoid: of a reranker's score."""

    folder: Path
    kind: str
    architecture: BertArchitecture | Architecture
    tensors: Mapping[str, StoredTensor]
    encoder: Encoder
    max_seq_len: int
    sigmoid: bool = False

    def files(self) -> list[Path]:
        """What an engine is made from."""
        return files_of(self.folder, ("config.json", *TOKENIZER_FILES, *SENTENCE_FILES), self.tensors)

    def sha256(self) -> str:
        """Over the names and contents of ``files``; weights may lie elsewhere, in a GGUF file."""
        files = {str(p.relative_to(self.folder) if p.is_relative_to(self.folder) else p.name): p for p in self.files()}
        return digest.sha256_json({name: digest.sha256_file(path) for name, path in files.items()})


def kind_of(folder: Path) -> str | None:
    """embedding or rerank for a checkpoint that can only be one; None for a generating model."""
    names = read_json(folder, "config.json").get("architectures")
    name = names[0] if isinstance(names, list) and names else ""
    if name in BERT_RERANK:
        return RERANK
    return EMBEDDING if name in (*BERT, *MASKED, *HEADLESS) or (folder / "modules.json").is_file() else None


def open_encoder(folder: Path, kind: str, instruction: str | None = None) -> EncoderCheckpoint:
    """Reads headers and JSON only. Raises CheckpointError.

    instruction: of a decoder that reranks; None for that of its model card.
    """
    config = Fields(read_json(folder, "config.json"), "config.json")
    try:
        names = config.texts("architectures")
        if names and names[0] in (*BERT, *BERT_RERANK, *MASKED):
            opened = _open_bert(folder, kind, config, names[0])
        else:
            opened = _open_decoder(folder, kind, config, instruction)
    except BadField as exc:
        raise CheckpointError(f"{folder}: {exc}") from exc
    check_tokenizer(folder, opened.architecture)
    return opened


def _open_bert(folder: Path, kind: str, config: Fields, name: str) -> EncoderCheckpoint:
    arch = _bert(config, name, kind == RERANK)
    if (name in BERT_RERANK) != arch.rerank:
        raise BadField(f"config.json: architectures is {name}, which is not of kind {kind!r}")

    def named(stored: str) -> str | None:
        bare = stored.removeprefix("bert.").removeprefix("roberta.")
        left = ("cls.", "lm_head.", "embeddings.position_ids") + (() if arch.rerank else ("pooler.",))
        return None if bare.startswith(left) else bare

    encoder, length = _sentence_files(folder, arch, config)
    if arch.rerank:
        encoder = Encoder("cls", False, 1, token_types=arch.token_types > 1)
    sigmoid = arch.rerank and _sigmoid(config)
    return EncoderCheckpoint(folder, kind, arch, read_tensors(folder, arch, named), encoder, length, sigmoid)


def _bert(config: Fields, name: str, rerank: bool) -> BertArchitecture:
    activation = config.text("hidden_act") or "gelu"
    if activation not in ACTIVATIONS:
        raise config.bad("hidden_act", f"one of {', '.join(ACTIVATIONS)}")
    if (config.text("position_embedding_type") or "absolute") != "absolute":
        raise config.bad("position_embedding_type", "absolute")
    labels = config.get("id2label")
    if rerank and config.integer("num_labels", len(labels) if isinstance(labels, dict) else 2) != 1:
        raise BadField("config.json: id2label has several labels; a reranker has one, its score")
    common = architectures.sizes(config)
    hidden, heads = common["hidden_size"], common["num_heads"]
    if hidden % heads:
        raise BadField(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    roberta = "Roberta" in name
    first = config.integer("pad_token_id", 1, low=0) + 1 if roberta else 0
    return BertArchitecture(
        name=name,
        **common,
        max_positions=config.integer("max_position_embeddings", 512, low=first + 1) - first,
        first_position=first,
        token_types=config.integer("type_vocab_size", 1 if roberta else 2),
        eps=config.number("layer_norm_eps", 1e-12, high=1.0),
        activation=activation,
        rerank=rerank,
    )


def _sigmoid(config: Fields) -> bool:
    """Whether sentence-transformers' CrossEncoder applies it to the logit: yes, unless config.json names another."""
    named = config.table("sentence_transformers").text("activation_fn")
    named = named or config.text("sbert_ce_default_activation_function") or "Sigmoid"
    if (name := named.rpartition(".")[2]) not in _ACTIVATIONS:
        raise BadField(f"config.json: the activation must be one of {', '.join(_ACTIVATIONS)}, got {named}")
    return _ACTIVATIONS[name]


def _open_decoder(folder: Path, kind: str, config: Fields, instruction: str | None) -> EncoderCheckpoint:
    names = config.texts("architectures")
    embedding = (*BERT, *MASKED, *HEADLESS, *architectures.SUPPORTED)
    allowed = embedding if kind == EMBEDDING else (*BERT_RERANK, "Qwen3ForCausalLM")
    if len(names) != 1 or names[0] not in allowed:
        raise config.bad("architectures", f"one of {', '.join(allowed)}")
    values = dict(config.values) | {"architectures": [HEADLESS.get(names[0], names[0])]}
    # Embeddings never read lm_head, and checkpoints made for them often lack it.
    arch = architectures.from_config(values | ({"tie_word_embeddings": True} if kind == EMBEDDING else {}))

    def named(stored: str) -> str | None:
        if kind == EMBEDDING and stored == "lm_head.weight":
            return None
        return stored if stored.startswith(("model.", "lm_head.")) else f"model.{stored}"

    tensors = read_tensors(folder, arch, named)
    encoder, length = _sentence_files(folder, arch, config)
    if kind == RERANK:
        before, body, after = _QWEN3_RERANKER
        template = (before, body.replace("INSTRUCTION", instruction or _INSTRUCTION), after)
        encoder = Encoder("last", False, 1, template=template)
    elif not (folder / "modules.json").is_file():
        encoder = dataclasses.replace(encoder, pooling="last", normalize=True)
    return EncoderCheckpoint(folder, kind, arch, tensors, encoder, length)


def _sentence_files(folder: Path, arch: BertArchitecture | Architecture, config: Fields) -> tuple[Encoder, int]:
    """How sentence-transformers' files say that texts become vectors, and their longest text in tokens."""
    pooling, normalize = "mean", False
    for module in _modules(folder):
        kind = module.text("type") or ""
        if kind.endswith(".Normalize"):
            normalize = True
        elif kind.endswith(".Pooling"):
            pooling = _pooling(_object(folder, f"{module.text('path')}/config.json"))
        elif not kind.endswith(".Transformer"):
            raise BadField(f"modules.json: {shown(kind)} is not supported; supported are Transformer, Pooling "
                                   "and Normalize")  # fmt: skip
    sentences = _object(folder, "config_sentence_transformers.json")
    prompts = sentences.table("prompts")
    names = {name: prompts.text(name) or "" for name in prompts.values}
    limits = _object(folder, "sentence_bert_config.json")
    if limits.boolean("do_lower_case", False):
        raise limits.bad("do_lower_case", "false, where the tokenizer lower-cases if the model wants it")
    if limits.get("max_seq_length") is not None:
        length = float(limits.integer("max_seq_length"))
    else:  # transformers writes 1e30 for none
        length = _object(folder, "tokenizer_config.json").number("model_max_length", arch.max_positions, above=1)
    shorter = config.get("matryoshka_dimensions")
    if shorter is not None and not (isinstance(shorter, list) and all(type(d) is int and 0 < d for d in shorter)):
        raise config.bad("matryoshka_dimensions", "a list of positive integers")
    allowed = tuple(sorted(d for d in set(shorter or ()) if d < arch.hidden_size))
    default = sentences.text("default_prompt_name") or ""
    if default and default not in names:
        raise sentences.bad("default_prompt_name", f"one of {', '.join(names)}")
    encoder = Encoder(pooling, normalize, arch.hidden_size, allowed, names, default)
    return encoder, int(min(length, arch.max_positions))


def _pooling(config: Fields) -> str:
    if not config.boolean("include_prompt", True):
        raise config.bad("include_prompt", "true: a prompt's tokens are pooled as others")
    named = config.get("pooling_mode")
    switched = [key for key, value in config.values.items() if key.startswith("pooling_mode_") and value is True]
    chosen = switched if named is None else list(map(str, named if isinstance(named, list) else [named]))
    if len(chosen) != 1 or chosen[0] not in _POOLINGS:
        raise BadField(f"{config.where}: the pooling is {', '.join(chosen) or 'none'}; supported is one of "
                               f"{', '.join(_POOLINGS)}")  # fmt: skip
    return _POOLINGS[chosen[0]]


def _modules(folder: Path) -> list[Fields]:
    path = folder / "modules.json"
    if not path.is_file():
        return []
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise BadField(f"{path} is not valid JSON: {exc}") from exc
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise BadField(f"{path}: must be a list of objects, got {shown(modules)}")
    return [Fields(module, "modules.json") for module in modules]


def _object(folder: Path, name: str) -> Fields:
    try:
        return Fields(read_object(folder / name), name)
    except FileNotFoundError:
        return Fields({}, name)
