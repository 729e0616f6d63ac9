"""What one quantisation is: the formats, the options, and what is refused before anything runs.

Everything here is pure; ``quantize.py`` runs it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build.base.architecture import Architecture
from contract.errors import InvalidArgument

# qformat -> (ModelOpt's configuration, quant_algo in config.json). Weight-only formats store whole weights; the
# builder quantises them when it loads (rule R22).
QFORMATS: dict[str, tuple[str | None, str | None]] = {
    "full_prec": (None, None),
    "fp8": ("FP8_DEFAULT_CFG", "FP8"),
    "fp8_pc_pt": ("FP8_PER_CHANNEL_PER_TOKEN_CFG", "FP8_PER_CHANNEL_PER_TOKEN"),
    "int8_sq": ("INT8_SMOOTHQUANT_CFG", "W8A8_SQ_PER_CHANNEL"),
    "int4_awq": ("INT4_AWQ_CFG", "W4A16_AWQ"),
    "w4a8_awq": ("W4A8_AWQ_BETA_CFG", "W4A8_AWQ"),
    "int8_wo": (None, "W8A16"),
    "int4_wo": (None, "W4A16"),
}
KV_CACHE_DTYPES = ("fp8", "int8")
DTYPES = ("bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
AWQ_CALIB_SIZE = 32  # quantize.py clamps to it without a word (rule R20); the search tries eleven scales per layer

# What the LLM API's PyTorch backend loads; a whole model it takes as it is.
HF_QFORMATS = ("full_prec", "fp8", "fp8_pc_pt", "int4_awq", "w4a8_awq")
TRTLLM, HF = "trtllm", "hf"


@dataclass(frozen=True)
class Quantization:
    """One run. Names and meanings are those of NVIDIA's ``quantize.py``; ``device`` is auto, cpu or cuda.

    awq_block_size: input columns that share a scale (AWQ formats only). batch_size: sequences per forward pass.
    calib_max_seq_length: tokens per sequence. checkpoint_format: ``trtllm``, one file per rank, for trtllm-build, or
    ``hf``, for the LLM API, which splits over tp_size ranks itself when it loads.
    """

    model_dir: Path
    output_dir: Path
    qformat: str = "fp8"
    kv_cache_dtype: str | None = None
    tp_size: int = 1
    dtype: str = "bfloat16"
    awq_block_size: int = 128
    calib_dataset: str = "cpython"
    calib_size: int = 512
    calib_max_seq_length: int = 512
    batch_size: int = 1
    seed: int = 1234
    device: str = "auto"
    checkpoint_format: str = TRTLLM

    @property
    def is_awq(self) -> bool:
        return self.qformat in ("int4_awq", "w4a8_awq")

    @property
    def needs_calibration(self) -> bool:
        return QFORMATS[self.qformat][0] is not None


def check(job: Quantization, arch: Architecture) -> None:
    """Raises InvalidArgument, which names the option and a way out, for unknown formats, head, vocabulary or block
    sizes that cannot be split over the ranks (rule R36) and formats that cannot share KV heads."""
    _require("qformat", job.qformat, QFORMATS)
    _require("kv_cache_dtype", job.kv_cache_dtype, (None, *KV_CACHE_DTYPES))
    _require("dtype", job.dtype, DTYPES)
    _require("device", job.device, DEVICES)
    _require("checkpoint_format", job.checkpoint_format, (TRTLLM, HF))
    if job.checkpoint_format == HF and job.qformat not in HF_QFORMATS:
        raise InvalidArgument("qformat", f"the LLM API loads no {job.qformat}; it loads {', '.join(HF_QFORMATS)}")
    for field in ("tp_size", "awq_block_size", "calib_size", "calib_max_seq_length", "batch_size"):
        if getattr(job, field) < 1:
            raise InvalidArgument(field, f"must be a positive integer, got {getattr(job, field)}")
    if job.kv_cache_dtype and not job.needs_calibration:
        needs = f"{job.kv_cache_dtype} needs a calibrated format; {job.qformat} measures no activations"
        raise InvalidArgument("kv_cache_dtype", needs)
    if (problem := split_problem(arch, job.tp_size, job.qformat, job.checkpoint_format)) is not None:
        raise InvalidArgument("tp_size", problem)
    if job.checkpoint_format == TRTLLM and (problem := bias_problem(arch)) is not None:
        raise InvalidArgument("model", problem)
    if not job.is_awq:
        return
    blocks = (job.awq_block_size, 128, 64)
    problems = {block: awq_problem(arch, job.tp_size, block, job.checkpoint_format) for block in blocks}
    if (problem := problems[job.awq_block_size]) is not None:
        fitting = [block for block in (128, 64) if problems[block] is None]
        instead = f"awq_block_size {fitting[0]}, " if fitting else ""
        fewer = "a smaller tp_size, " if job.tp_size > 1 else ""
        raise InvalidArgument("awq_block_size", f"{problem} (rule R36); use {instead}{fewer}fp8 or int8_sq")


def _require(field: str, value: object, allowed: Any) -> None:
    if value not in allowed:
        raise InvalidArgument(field, f"must be one of {', '.join(str(a).lower() for a in allowed)}, got {value!r}")


def split_problem(arch: Architecture, tp_size: int, qformat: str, checkpoint_format: str) -> str | None:
    """Why the model cannot be split over tensor-parallel ranks, or None."""
    kv_heads = arch.num_kv_heads
    sizes = {"hidden_size": arch.hidden_size, "intermediate_size": arch.intermediate_size}
    for name, size in ({"num_attention_heads": arch.num_heads} | sizes).items():
        if size % tp_size:
            return f"{tp_size} ranks cannot share the model's {name} {size} evenly"
    if max(tp_size, kv_heads) % min(tp_size, kv_heads):
        return f"{tp_size} ranks and {kv_heads} KV heads: one must be a multiple of the other"
    if checkpoint_format == TRTLLM and tp_size > kv_heads and qformat in ("int8_sq", "fp8_pc_pt"):
        shared = f"{tp_size} ranks would share {kv_heads} KV head(s), which ModelOpt cannot do with one scale per"
        return f"{shared} output row ({qformat}); use at most tp_size {kv_heads}, or fp8, int4_awq or w4a8_awq"
    return None


def bias_problem(arch: Architecture) -> str | None:
    """Why TensorRT-LLM's network has no place for the model's biases, or None."""
    if not (arch.output_bias and arch.name.startswith("Qwen")):
        return None
    return "its attention_bias puts a bias on o_proj, for which TensorRT-LLM's Qwen has no place; kind llmapi has one"


def awq_problem(arch: Architecture, tp_size: int, block: int, checkpoint_format: str) -> str | None:
    """Why blocks of columns that share a scale do not divide what one rank multiplies (rule R36), or None."""
    # qkv, fc and gate have all their inputs on every rank, and yet ModelOpt's exporter for engines divides them.
    sharing = tp_size if checkpoint_format == TRTLLM else 1
    inputs = {
        "attention.dense": (arch.num_heads * arch.head_dim, tp_size),
        "mlp.proj": (arch.intermediate_size, tp_size),
        "attention.qkv, mlp.fc and mlp.gate": (arch.hidden_size, sharing),
    }
    for module, (columns, ranks) in inputs.items():
        if columns % (ranks * block):
            where = f"{module} has {columns // ranks} inputs on each of {tp_size} rank(s)"
            return f"{where}, not a multiple of the block of {block} columns that share a scale"
    return None
