"""A TensorRT-LLM checkpoint read back: ``config.json`` and one ``rank{N}.safetensors`` per tensor-parallel rank.

``read`` checks every name, dtype and shape against what ``config.json`` implies, because ``trtllm-build`` only warns
about a tensor that its network has no place for (a bias, say) and then compiles a wrong engine. ``Checkpoint.tensor``
joins the ranks; ``Checkpoint.decoder`` dequantises and puts the engine's rounding into a numpy decoder.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from build.base import rope as rotary
from build.base import shards
from build.base.architecture import Architecture
from build.base.json_fields import BadField, read_object
from build.base.shards import StoredTensor
from build.model.decoder import Decoder, Linear, Round, assembled
from build.quantise import quantised_linear
from build.quantise.quantised_linear import AWQ, BadCheckpoint, Tensors, as_f32, shortened, stored_array

FLOAT_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
COLUMN = ("attention.qkv", "mlp.fc", "mlp.gate")  # split along out; the others along in
# What a Hugging Face name becomes, part by part; query, key and value are one module, attention.qkv.
RENAMED = {
    "model.embed_tokens": "transformer.vocab_embedding",
    "model.norm": "transformer.ln_f",
    "model.layers": "transformer.layers",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_proj": "attention.qkv",
    "self_attn": "attention",
    "_norm": "_layernorm",
    "post_attention_layernorm": "post_layernorm",
    "mlp.gate_proj": "mlp.fc",
    "mlp.up_proj": "mlp.gate",
    "mlp.down_proj": "mlp.proj",
}


@dataclass(frozen=True)
class Checkpoint:
    """``ranks[r]`` holds the tensors of rank r by name; each is loaded when it is read."""

    folder: Path
    config: Mapping
    ranks: tuple[Mapping[str, StoredTensor], ...]

    @property
    def quant_algo(self) -> str | None:
        return self.config["quantization"].get("quant_algo")

    @property
    def kv_cache_quant_algo(self) -> str | None:
        return self.config["quantization"].get("kv_cache_quant_algo")

    @property
    def weight_bytes(self) -> int:
        """Bytes of all rank files together."""
        return sum((self.folder / f"rank{rank}.safetensors").stat().st_size for rank in range(len(self.ranks)))

    def stored(self) -> Iterator[StoredTensor]:
        """Every tensor of every rank."""
        return (tensor for rank in self.ranks for tensor in rank.values())

    def tensor(self, name: str) -> np.ndarray:
        """A tensor as an export for one rank stores it (bf16 as u16 bits, FP8 as u8 bits, INT4 packed). Raises
        BadCheckpoint where ranks that must hold copies differ."""
        parts = [stored_array(rank[name]) for rank in self.ranks]
        if name in ("transformer.vocab_embedding.weight", "lm_head.weight"):
            return np.concatenate(parts)[: self.config["vocab_size"]]
        module, _, kind = name.removeprefix("transformer.layers.").partition(".")[2].rpartition(".")
        if module in COLUMN and kind != "prequant_scaling_factor" and parts[0].size > 1:
            return self._join_qkv(name, parts) if module == "attention.qkv" else np.concatenate(parts)
        if module in ("attention.dense", "mlp.proj") and kind == "prequant_scaling_factor":
            return np.concatenate(parts)
        if module in ("attention.dense", "mlp.proj") and parts[0].ndim == 2:
            return np.concatenate(parts, axis=1)
        return self._copies(name, parts)

    def f32(self, name: str) -> np.ndarray:
        """A tensor of the whole model by value; FP8 and INT8 without their scale."""
        return as_f32(self.tensor(name), self.ranks[0][name].dtype)

    def decoder(self) -> Decoder:
        """The engine's numerics: dequantised weights, inputs and KV cache rounded as its kernels round them."""
        arch = replace(architecture(self.config), tied="lm_head.weight" not in self.ranks[0])
        return assembled(
            arch,
            lambda name: self.f32(renamed(name)),
            lambda *modules: self.linear(renamed(modules[0])),
            self._round_kv,
        )

    def _round_kv(self, at: str) -> Round | None:
        name = f"{renamed(at)}.attention.kv_cache_scaling_factor"
        return quantised_linear.kv_cache_rounding(self.kv_cache_quant_algo, lambda: self.f32(name))

    def linear(self, module: str) -> Linear:
        """``transformer.layers.0.mlp.fc`` and the like: weights dequantised, inputs rounded as the kernel does."""
        whole = self.quant_algo is None or self.quant_algo in quantised_linear.WEIGHT_ONLY_BITS
        weight = f"{module}.weight"
        return quantised_linear.linear(
            self.quant_algo,
            self.f32(weight) if whole else self.tensor(weight),
            scale=self._optional(f"{module}.weights_scaling_factor", f"{module}.per_channel_scale"),
            scale_2=self._optional(f"{module}.weights_scaling_factor_2"),
            input_scale=self._optional(f"{module}.activation_scaling_factor"),
            prequant=self._optional(f"{module}.prequant_scaling_factor"),
            bias=self._optional(f"{module}.bias"),
        )

    def _optional(self, *names: str) -> np.ndarray | None:
        """The first of these tensors that the format has."""
        return next((self.f32(name) for name in names if name in self.ranks[0]), None)

    def _join_qkv(self, name: str, parts: list[np.ndarray]) -> np.ndarray:
        """Each rank holds [Q_r; K_r; V_r]; with fewer KV heads than ranks, neighbouring ranks share a KV head."""
        config, tp = self.config, len(parts)
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        copies = max(1, tp // kv_heads)
        local_q, local_kv = heads // tp, max(1, kv_heads // tp)
        unit = len(parts[0]) // (local_q + 2 * local_kv)  # rows of one head; half of them where two are packed in one
        split = [np.split(part, [local_q * unit, (local_q + local_kv) * unit]) for part in parts]
        for rank, (_, key, value) in enumerate(split):
            first = rank - rank % copies
            if not (np.array_equal(key, split[first][1]) and np.array_equal(value, split[first][2])):
                file = f"{self.folder}/rank{rank}.safetensors"
                raise BadCheckpoint(file, f"the KV rows of {name} are not rank {first}'s")
        keys, values = ([part[of] for part in split[::copies]] for of in (1, 2))
        return np.concatenate([*(query for query, _, _ in split), *keys, *values])

    def _copies(self, name: str, parts: list[np.ndarray]) -> np.ndarray:
        for rank, part in enumerate(parts):
            if part.tobytes() != parts[0].tobytes():
                raise BadCheckpoint(f"{self.folder}/rank{rank}.safetensors", f"{name} differs from rank 0's copy")
        return parts[0]


def renamed(name: str) -> str:
    """A Hugging Face name as TensorRT-LLM has it."""
    for part, ours in RENAMED.items():
        name = name.replace(part, ours)
    return name


def architecture(config: Mapping) -> Architecture:
    """The decoder that config.json describes. ``vocab_size`` counts padding, see rule R37."""
    has_bias, is_qwen = attention_bias(config), config["architecture"].startswith("Qwen")
    rope = {"rope_theta": config.get("rotary_base"), "rope_scaling": config.get("rotary_scaling")}
    return Architecture(
        name=config["architecture"],
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_size"],
        rms_norm_eps=config["norm_epsilon"],
        rope=rotary.from_config(rope | {"max_position_embeddings": config["max_position_embeddings"]}),
        max_positions=config["max_position_embeddings"],
        tied=bool(config.get("share_embedding_table")),
        qkv_bias=has_bias,
        output_bias=has_bias and not is_qwen,
        mlp_bias=bool(config.get("mlp_bias")),
        qk_norm=config.get("qwen_type") == "qwen3",
    )


def attention_bias(config: Mapping) -> bool:
    """Whether qkv has a bias. By default TensorRT-LLM's Qwen2 has one and its Llama none."""
    return bool(config.get("attn_bias", config["architecture"] == "Qwen2ForCausalLM"))


def expected_tensors(config: Mapping) -> Tensors:
    """(safetensors dtype, shape) of every tensor in each rank's file, by name. Weights are [out, in].

    ``lm_head.weight`` is in the list also where the embedding is shared; it may then be absent.
    """
    arch, tp = architecture(config), config["mapping"]["tp_size"]
    dtype = FLOAT_DTYPES[config["dtype"]]
    hidden, ffn = arch.hidden_size, arch.intermediate_size // tp
    q_rows = arch.num_heads // tp * arch.head_dim
    qkv_rows = q_rows + 2 * max(1, arch.num_kv_heads // tp) * arch.head_dim
    vocab = -(-arch.vocab_size // tp)
    tensors: Tensors = {
        "transformer.vocab_embedding.weight": (dtype, (vocab, hidden)),
        "transformer.ln_f.weight": (dtype, (hidden,)),
        "lm_head.weight": (dtype, (vocab, hidden)),
    }
    linears = {
        "attention.qkv": (qkv_rows, hidden, arch.qkv_bias),
        "attention.dense": (hidden, q_rows, arch.output_bias),
        "mlp.fc": (ffn, hidden, arch.mlp_bias),
        "mlp.gate": (ffn, hidden, arch.mlp_bias),
        "mlp.proj": (hidden, ffn, arch.mlp_bias),
    }
    for layer in range(arch.num_layers):
        at = f"transformer.layers.{layer}"
        tensors[f"{at}.input_layernorm.weight"] = tensors[f"{at}.post_layernorm.weight"] = (dtype, (hidden,))
        for name, (rows, columns, bias) in linears.items():
            for kind, entry in _linear_tensors(config, rows, columns).items():
                tensors[f"{at}.{name}.{kind}"] = entry
            if bias:
                tensors[f"{at}.{name}.bias"] = (dtype, (rows,))
        if arch.qk_norm:
            for side in ("q", "k"):
                tensors[f"{at}.attention.{side}_layernorm.weight"] = (dtype, (arch.head_dim,))
        if config["quantization"].get("kv_cache_quant_algo"):
            for prefix in ("kv_cache", "k_cache", "v_cache"):
                tensors[f"{at}.attention.{prefix}_scaling_factor"] = ("F32", (1,))
    return tensors


def _linear_tensors(config: Mapping, rows: int, columns: int) -> Tensors:
    dtype, algo = FLOAT_DTYPES[config["dtype"]], config["quantization"].get("quant_algo")
    scalar = ("F32", (1,))
    inputs: Tensors = {"activation_scaling_factor": scalar}
    prequant: Tensors = {"prequant_scaling_factor": (dtype, (columns,))}
    if algo == "FP8":
        return inputs | {"weight": ("F8_E4M3", (rows, columns)), "weights_scaling_factor": scalar}
    if algo == "FP8_PER_CHANNEL_PER_TOKEN":
        return {"weight": ("F8_E4M3", (rows, columns)), "per_channel_scale": ("F32", (rows,))}
    if algo == "W8A8_SQ_PER_CHANNEL":
        return inputs | prequant | {"weight": ("I8", (rows, columns)), "weights_scaling_factor": ("F32", (rows,))}
    if algo in AWQ:
        scales = ("F32", (rows, columns // config["quantization"]["group_size"]))
        tensors = prequant | {"weight": ("I8", (rows // 2, columns)), "weights_scaling_factor": scales}
        return tensors | inputs | {"weights_scaling_factor_2": scalar} if algo == "W4A8_AWQ" else tensors
    return {"weight": (dtype, (rows, columns))}


_SIZES = """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_size
    max_position_embeddings
""".split()


def read(folder: Path | str) -> Checkpoint:
    """Opens a checkpoint; tensor values are not looked at. Raises BadCheckpoint when config.json is incomplete, rank
    files do not match its mapping (rule R33), or a tensor is missing, unexpected, or of another dtype or shape."""
    folder = Path(folder)
    config = _read_config(folder / "config.json")
    tp = config["mapping"]["tp_size"]
    files = {f"rank{rank}.safetensors" for rank in range(tp)}
    there = {path.name for path in folder.glob("rank*.safetensors")}
    if there != files:
        problem = f"config.json says tp_size {tp}, so {shortened(files)} belong here; found {shortened(there)}"
        raise BadCheckpoint(str(folder), problem)
    needed = expected_tensors(config)
    optional = {"lm_head.weight": needed.pop("lm_head.weight")} if config.get("share_embedding_table") else {}
    ranks = []
    for path in (folder / f"rank{rank}.safetensors" for rank in range(tp)):
        try:
            ranks.append(shards.read_header(path))
        except BadField as exc:
            raise BadCheckpoint(str(path), str(exc)) from exc
        quantised_linear.check_tensors(str(path), ranks[-1], needed, optional)
    return Checkpoint(folder, config, tuple(ranks))


def _read_config(path: Path) -> dict:
    try:
        config: dict = read_object(path)
    except FileNotFoundError as exc:
        raise BadCheckpoint(str(path), "does not exist; is this the folder of a TensorRT-LLM checkpoint?") from exc
    except (OSError, ValueError) as exc:
        raise BadCheckpoint(str(path), f"is not JSON: {exc}") from exc
    missing = [key for key in ("architecture", "dtype", "norm_epsilon", "mapping", "quantization") if key not in config]
    missing += [key for key in _SIZES if not isinstance(config.get(key), int) or config[key] < 1]
    if missing:
        raise BadCheckpoint(str(path), f"lacks a valid {', '.join(missing)}")
    if config["dtype"] not in FLOAT_DTYPES:
        raise BadCheckpoint(str(path), f"dtype must be one of {', '.join(FLOAT_DTYPES)}, got {config['dtype']!r}")
    quantised_linear.check_quantization(str(path), config["quantization"], quantised_linear.QUANT_ALGOS)
    mapping = config["mapping"]
    if mapping.get("pp_size", 1) != 1 or mapping["tp_size"] != mapping["world_size"]:
        raise BadCheckpoint(str(path), f"mapping is {mapping}; only tensor parallelism is read (pp_size 1)")
    return config


def check_values(tensors: Iterable[StoredTensor]) -> None:
    """Raises BadCheckpoint where a value is not finite or a scale is not positive. Looks at every value."""
    for tensor in tensors:
        array = stored_array(tensor)
        # In bits, because making f32 of every weight would take four times the memory.
        if tensor.dtype in ("I8", "U8"):
            continue
        if tensor.dtype == "BF16":
            is_bad = (array & 0x7F80) == 0x7F80
        elif tensor.dtype == "F8_E4M3":
            is_bad = (array & 0x7F) == 0x7F
        else:
            is_bad = ~np.isfinite(array)
        if is_bad.any():
            raise BadCheckpoint(str(tensor.path), f"{tensor.name} has {int(is_bad.sum())} values that are not finite")
        if "scal" in tensor.name and not (as_f32(array, tensor.dtype) > 0).all():
            raise BadCheckpoint(str(tensor.path), f"{tensor.name} has a scale that is not positive")
