"""A recipe: how one engine is made, read from ``build/recipes/<engine>.toml``.

``load`` checks form only: known keys, types, ranges, and that the keys belong to the recipe's kind. Whether the
combination works on the target GPU is ``rules.py``'s question. ``KEYS`` is the list of everything a recipe may say.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from build.base import hardware, layout
from build.base.option_table import closest, nearest, shown
from build.base.option_table import read as read_option_table
from contract.errors import InvalidArgument

if sys.version_info >= (3, 11):
    import tomllib
else:  # the same parser under its older name
    import tomli as tomllib

MAX_NEAREST = 3  # names offered for one that is not there
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
CPU, TRTLLM, LLMAPI = "cpu", "trtllm", "llmapi"
KINDS = (CPU, TRTLLM, LLMAPI)
GPU_KINDS = (TRTLLM, LLMAPI)

TRTLLM_VERSION = "1.2.1"
# One image builds and serves, so TensorRT is the same on both sides.
IMAGE = "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"

PRECISIONS = {
    CPU: ("bf16", "fp16", "fp32", "int8", "int4"),
    TRTLLM: ("bf16", "fp8", "fp8_pc_pt", "int4_awq", "w4a8_awq", "int8_sq", "int8_wo", "int4_wo", "nvfp4"),
    LLMAPI: ("bf16", "fp8", "fp8_pc_pt", "int4_awq", "w4a8_awq", "nvfp4"),
}
AUTO = "auto"  # precision of a CPU recipe: the fastest setting of choice.py that passes the quality gate
FIRST_TRIED = "int8"
HEAD_PRECISIONS = ("int8", "bf16")
KV_CACHE_PRECISIONS = {
    CPU: ("u8", "f16", "bf16", "f32"),  # OpenVINO's KV_CACHE_PRECISION
    TRTLLM: ("auto", "fp8", "int8"),  # auto = the model's own dtype
    LLMAPI: ("auto", "fp8"),
}
SPECULATIVE_KEYS = {
    "draft_tokens_external": ("max_draft_len",),
    "lookahead_decoding": ("window_size", "ngram_size", "verification_set_size"),
    "medusa": ("max_draft_len", "medusa_model", "num_medusa_heads", "choices"),
    "explicit_draft_tokens": ("max_draft_len",),
    "eagle": ("max_draft_len", "choices"),
}
OPTIMIZE_FOR = ("balanced", "latency", "throughput")


class RecipeError(InvalidArgument):
    """A recipe says something it may not. ``key`` names the entry (``calibration.size``), ``path`` the file."""

    def __init__(self, path: Path | str, key: str, problem: str) -> None:
        self.path = str(path)
        self.key = key
        file = str(layout.relative(Path(path)))
        super().__init__(f"{file}: {key[:128]}" if key else file, problem)


@dataclass(frozen=True)
class Calibration:
    """The texts activations are measured on.

    dataset: ``cnn_dailymail``, ``cpython`` (the standard library, read by our own stages only) or a local folder that
    loads with split ``train`` and a ``text`` column.
    size: texts. max_seq_length: tokens kept of each. batch_size: texts per forward pass.
    """

    dataset: str = "cnn_dailymail"
    size: int = 512
    batch_size: int = 8
    max_seq_length: int = 2048


# A pass over 8192 tokens takes seconds for a small model and minutes for one of a billion parameters.
CPU_CALIBRATION = Calibration(dataset="cpython", size=32, batch_size=1, max_seq_length=256)


@dataclass(frozen=True)
class SpeculativeDecoding:
    """How draft tokens are made. ``max_draft_len`` is derived for lookahead and given for every other mode."""

    mode: str
    max_draft_len: int
    window_size: int | None = None
    ngram_size: int | None = None
    verification_set_size: int | None = None
    medusa_model: str | None = None
    num_medusa_heads: int | None = None
    choices: str | None = None


@dataclass(frozen=True)
class QualityBudget:
    """How far an engine may stray from the bf16 reference on held-out text before it is not packaged.

    perplexity_ratio: engine over reference, at most. top1_agreement: share of positions with the same most likely
    token, at least. kl: mean KL(reference || engine) in nats per token, at most.
    """

    perplexity_ratio: float
    top1_agreement: float
    kl: float


# Starting points, wider for fewer bits; a recipe's [quality] overrides them key by key. KL is what notices damage:
# three to five times what the demo model loses. Top-1 agreement of so small a model, full of near ties, moves by half
# a point with texts and calibration alone (fp8: 93.6 to 94.6 % over four seeds and three sets of texts), so that bound
# lies three standard errors of 2000 tokens or more below what was measured (docs/quality.md).
DEFAULT_QUALITY = {
    "bf16": QualityBudget(1.01, 0.97, 0.01),
    "fp16": QualityBudget(1.01, 0.97, 0.01),
    "fp32": QualityBudget(1.01, 0.97, 0.01),
    "fp8": QualityBudget(1.03, 0.92, 0.02),
    "fp8_pc_pt": QualityBudget(1.03, 0.92, 0.02),
    "int8": QualityBudget(1.02, 0.95, 0.02),
    "int8_wo": QualityBudget(1.02, 0.95, 0.02),
    "int8_sq": QualityBudget(1.05, 0.90, 0.06),
    "int4": QualityBudget(1.10, 0.85, 0.10),
    "int4_wo": QualityBudget(1.10, 0.85, 0.10),
    "int4_awq": QualityBudget(1.08, 0.86, 0.06),
    "w4a8_awq": QualityBudget(1.10, 0.85, 0.10),
    "nvfp4": QualityBudget(1.08, 0.86, 0.06),
}


@dataclass(frozen=True)
class Recipe:
    """One engine, as wanted. Limits are of the engine, so of all requests together unless said otherwise.

    name: the file's stem; also the engine's folder and its ``configs/<name>.pbtxt``.
    model: Hugging Face id or local folder; revision: the hub commit, None for the newest.
    max_batch_size: sequences running at once. max_num_tokens: tokens of one step over all sequences.
    max_seq_len: prompt plus output of one sequence; None only when a trtllm recipe leaves it out (rule R11 refuses it).
    prefix_reuse: prompts that begin alike share KV blocks. chunked_context: long prompts are prefilled in pieces.
    given: keys the file sets itself, so that one without effect is refused even where it repeats its default.
    group_size: input columns that share a weight scale (AWQ block size; int4 groups on the CPU).

    cpu: head_precision is that of the embedding and lm_head under int8 or int4 weights: int8, or bf16, which costs a
    byte per entry and gives back a third of int8's loss. automatic: the build chooses precision, head_precision and
    kv_cache_precision by measuring (precision "auto" in the file). With calibration, for int4 only, ``gptq.py``
    chooses the weights; without (None) they are rounded to nearest. kv_cache_tokens is the size of the KV pool. On a
    GPU it is an upper bound of the pool, None for kv_cache_fraction of the memory left after load alone.
    trtllm, llmapi: gpu names a card of ``hardware.py`` and sm its compute capability times ten (90 for 9.0); a recipe
    gives either, ``load`` fills in the other (the reference card of an sm); tp and pp are tensor- and
    pipeline-parallel ranks; image is the container that builds and serves.
    trtllm: build, quantize and convert are options passed on to the programs of those names, checked against their
    option tables; they win over what the plan would choose.
    """

    name: str
    kind: str
    model: str
    precision: str
    kv_cache_precision: str
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int | None
    prefix_reuse: bool = True
    chunked_context: bool = True
    description: str = ""
    revision: str | None = None
    group_size: int = 128
    head_precision: str = "int8"
    automatic: bool = False
    kv_cache_tokens: int | None = None
    kv_cache_fraction: float = 0.9
    gpu: str | None = None
    sm: int | None = None
    tp: int = 1
    pp: int = 1
    max_beam_width: int = 1
    multiple_profiles: bool = True
    optimize_for: str = "balanced"
    image: str = IMAGE
    calibration: Calibration | None = field(default_factory=Calibration)
    speculative_decoding: SpeculativeDecoding | None = None
    quality: QualityBudget = field(default_factory=lambda: DEFAULT_QUALITY["bf16"])
    build: Mapping[str, object] = field(default_factory=dict)
    quantize: Mapping[str, object] = field(default_factory=dict)
    convert: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    given: tuple[str, ...] = field(default=(), repr=False, compare=False)

    @property
    def world_size(self) -> int:
        """Ranks, one GPU each."""
        return self.tp * self.pp


# A check takes a value and says what is allowed instead, or returns None.
Check = Callable[[object], "str | None"]


def _integer(low: int, high: int) -> Check:
    def check(value: object) -> str | None:
        ok = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        return None if ok else f"allowed is an integer from {low} to {high}"

    return check


def _number(low: float, high: float) -> Check:
    def check(value: object) -> str | None:
        ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        return None if ok and low <= value <= high else f"allowed is a number from {low:g} to {high:g}"

    return check


def _boolean(value: object) -> str | None:
    return None if isinstance(value, bool) else "allowed is true or false"


def _text(value: object) -> str | None:
    ok = isinstance(value, str) and value.strip() and value.isprintable()
    return None if ok else "allowed is a non-empty string on one line"


def _matching(pattern: str, what: str) -> Check:
    def check(value: object) -> str | None:
        ok = isinstance(value, str) and re.fullmatch(pattern, value) and ".." not in value
        return None if ok else f"allowed is {what}"

    return check


def _one_of(*allowed: object) -> Check:
    def check(value: object) -> str | None:
        if type(value) in {type(a) for a in allowed} and value in allowed:
            return None
        words = tuple(map(str, allowed))
        near = f"; nearest is {nearest(value, words)!r}" if isinstance(value, str) else ""
        return f"allowed is one of {', '.join(words)}{near}"

    return check


@dataclass(frozen=True)
class _Key:
    check: Check | None = None  # None: the allowed values depend on the kind, or the value is a table
    kinds: tuple[str, ...] = KINDS
    required_for: tuple[str, ...] = ()


KEYS: dict[str, _Key] = {
    "name": _Key(_text),
    "kind": _Key(_one_of(*KINDS), required_for=KINDS),
    "description": _Key(_text),
    "model": _Key(_text, required_for=KINDS),
    "revision": _Key(_matching(r"[A-Za-z0-9][A-Za-z0-9._/-]*", "a branch, tag or commit of the hub")),
    "precision": _Key(required_for=KINDS),
    "kv_cache_precision": _Key(),
    "head_precision": _Key(_one_of(*HEAD_PRECISIONS), (CPU,)),
    "max_batch_size": _Key(_integer(1, 4096), required_for=KINDS),
    "max_num_tokens": _Key(_integer(1, 1_048_576), required_for=KINDS),
    "max_seq_len": _Key(_integer(2, 10_485_760), required_for=(CPU, LLMAPI)),
    "prefix_reuse": _Key(_boolean),
    "chunked_context": _Key(_boolean),
    "group_size": _Key(_one_of(32, 64, 128, 256)),
    "kv_cache_tokens": _Key(_integer(32, 2**31 - 1), required_for=(CPU,)),
    "kv_cache_fraction": _Key(_number(0.01, 1.0), GPU_KINDS),
    "gpu": _Key(hardware.problem, GPU_KINDS),
    "sm": _Key(_one_of(*hardware.SMS), GPU_KINDS),
    "tp": _Key(_one_of(1, 2, 4, 8, 16), GPU_KINDS),
    "pp": _Key(_one_of(1, 2, 4, 8, 16), GPU_KINDS),
    "max_beam_width": _Key(_integer(1, 64), (TRTLLM,)),
    "multiple_profiles": _Key(_boolean, (TRTLLM,)),
    "optimize_for": _Key(_one_of(*OPTIMIZE_FOR), (TRTLLM,)),
    "image": _Key(_matching(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", "a container image, e.g. registry/name:tag"), GPU_KINDS),
    "calibration": _Key(),
    "speculative_decoding": _Key(kinds=(TRTLLM,)),
    "quality": _Key(),
    "build": _Key(kinds=(TRTLLM,)),
    "quantize": _Key(kinds=(TRTLLM,)),
    "convert": _Key(kinds=(TRTLLM,)),
    "environment": _Key(kinds=GPU_KINDS),
}
_CALIBRATION: dict[str, Check] = {
    "dataset": _text,
    "size": _integer(1, 100_000),
    "batch_size": _integer(1, 1024),
    "max_seq_length": _integer(8, 131_072),
}
_QUALITY: dict[str, Check] = {
    "perplexity_ratio": _number(1.0, 10.0),
    "top1_agreement": _number(0.0, 1.0),
    "kl": _number(0.0, 10.0),
}
_SPECULATIVE: dict[str, Check] = {
    "mode": _one_of(*SPECULATIVE_KEYS),
    "max_draft_len": _integer(1, 1024),
    "window_size": _integer(1, 64),
    "ngram_size": _integer(1, 64),
    "verification_set_size": _integer(1, 64),
    "medusa_model": _text,
    "num_medusa_heads": _integer(1, 16),
    "choices": _text,
}
# Options the recipe has its own keys for: one value, one home.
_OWN_KEY = {
    "build": {
        "max_batch_size": "max_batch_size",
        "max_num_tokens": "max_num_tokens",
        "max_seq_len": "max_seq_len",
        "max_decoder_seq_len": "max_seq_len",
        "max_beam_width": "max_beam_width",
        "speculative_decoding_mode": "speculative_decoding.mode",
        "max_draft_len": "speculative_decoding.max_draft_len",
    },
    "quantize": {
        "qformat": "precision",
        "kv_cache_dtype": "kv_cache_precision",
        "tp_size": "tp",
        "pp_size": "pp",
        "calib_dataset": "calibration.dataset",
        "calib_size": "calibration.size",
        "batch_size": "calibration.batch_size",
        "calib_max_seq_length": "calibration.max_seq_length",
        "awq_block_size": "group_size",
        "max_draft_len": "speculative_decoding.max_draft_len",
        "num_medusa_heads": "speculative_decoding.num_medusa_heads",
        "medusa_model_dir": "speculative_decoding.medusa_model",
    },
    "convert": {
        "tp_size": "tp",
        "pp_size": "pp",
        "calib_dataset": "calibration.dataset",
        "calib_size": "calibration.size",
        "calib_max_seq_length": "calibration.max_seq_length",
        "group_size": "group_size",
    },
}
_PATHS = ("checkpoint_dir", "model_dir", "output_dir")  # the plan's own
_TABLES = {"calibration", "speculative_decoding", "quality", "build", "quantize", "convert", "environment"}


def named(engine: str) -> Recipe:
    """The recipe ``build/recipes/<engine>.toml``; RecipeError as ``load``, InvalidArgument for what is no name."""
    if not NAME.fullmatch(engine):
        raise InvalidArgument("engine", f"must be a name of letters, digits, '.', '_' and '-', got {shown(engine)}")
    return load(layout.RECIPES / f"{engine}.toml")


def load(path: Path | str) -> Recipe:
    """Reads one recipe.

    Raises RecipeError, which names the file, the key, what is allowed and the nearest valid key, when the file is
    missing, is not TOML, or holds an unknown key, a wrong type or a value out of range.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as exc:
        known = [p.stem for p in sorted(path.parent.glob("*.toml"))]
        near = ", ".join(repr(name) for name in closest(path.stem, known, MAX_NEAREST))
        where = f"`ls {shlex.quote(str(layout.relative(path.parent)))}` lists all {len(known)}"
        listed = f"nearest is {near}; {where}" if known else "the folder has none"
        raise RecipeError(path, "", f"there is no such recipe; {listed}") from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise RecipeError(path, "", f"the recipe cannot be read: {exc}") from exc
    try:
        table = tomllib.loads(text)
    except RecursionError as exc:
        raise RecipeError(path, "", "not valid TOML: too deeply nested") from exc
    except ValueError as exc:  # TOMLDecodeError, and Python's own for an integer of thousands of digits
        raise RecipeError(path, "", f"not valid TOML: {exc}") from exc
    return parse(table, path)


def parse(table: Mapping[str, object], path: Path | str) -> Recipe:
    """The recipe inside a TOML table; ``path`` gives it its name and stands in its errors."""
    path = Path(path)
    for key in table:
        if key not in KEYS:
            raise RecipeError(path, key, _unknown(key, tuple(KEYS)))
    kind = table.get("kind")
    if "kind" not in table:
        raise RecipeError(path, "kind", f"is missing; allowed is one of {', '.join(KINDS)}")
    _require(path, "kind", kind, KEYS["kind"].check)

    for key, rule in KEYS.items():
        if key in table and kind not in rule.kinds:
            raise RecipeError(path, key, f"does not apply to kind {kind!r}; it belongs to {' and '.join(rule.kinds)}")
        if key not in table and kind in rule.required_for:
            raise RecipeError(path, key, f"is missing; every recipe of kind {kind!r} must set it")
        if key in table and key in _TABLES:
            if not isinstance(table[key], Mapping):
                raise RecipeError(path, key, f"got {shown(table[key])}; allowed is a table: [{key}]")
        elif key in table and rule.check is not None:
            _require(path, key, table[key], rule.check)
    _require(path, "precision", table["precision"], _one_of(*PRECISIONS[kind], *((AUTO,) if kind == CPU else ())))
    kv_default = KV_CACHE_PRECISIONS[kind][0]
    _require(
        path, "kv_cache_precision", table.get("kv_cache_precision", kv_default), _one_of(*KV_CACHE_PRECISIONS[kind])
    )
    if not NAME.fullmatch(path.stem):
        raise RecipeError(path, "name", f"got {path.stem!r}; a recipe's file name is letters, digits, '.', '_' and '-'")
    if table.get("name", path.stem) != path.stem:
        raise RecipeError(path, "name", f"got {table['name']!r}; a recipe is named by its file: {path.stem!r}")
    if kind in GPU_KINDS and "gpu" not in table and "sm" not in table:
        raise RecipeError(path, "gpu", "is missing; name the target card (gpu) or its compute capability (sm, e.g. 90)")

    values = {key: value for key, value in table.items() if key not in _TABLES}
    if kind in GPU_KINDS:
        values |= _card(path, table)
    values |= {"name": path.stem, "kv_cache_precision": table.get("kv_cache_precision", kv_default)}
    values.setdefault("max_seq_len", None)
    if table["precision"] == AUTO:
        for key in ("kv_cache_precision", "head_precision", "calibration", "group_size"):
            if key in table:
                raise RecipeError(path, key, f"does not go with precision {AUTO!r}, which chooses it; leave it out")
        values |= {"precision": FIRST_TRIED, "automatic": True}
    precision = str(values["precision"])
    if values.get("head_precision", "int8") != "int8" and precision not in ("int8", "int4"):
        problem = f"has no effect on {precision} weights, whose embedding and lm_head are {precision} too; leave it out"
        raise RecipeError(path, "head_precision", problem)
    return Recipe(
        **values,
        calibration=_calibration(path, table),
        speculative_decoding=_speculative(path, table),
        quality=_quality(path, table, DEFAULT_QUALITY[precision]),
        build=_options(path, "build", table, ("trtllm_build",)),
        quantize=_options(path, "quantize", table, ("quantize",)),
        convert=_options(path, "convert", table, ("convert_checkpoint_llama", "convert_checkpoint_qwen")),
        environment=_environment(path, table),
        given=tuple(table),
    )


def _card(path: Path, table: Mapping) -> dict[str, object]:
    if "gpu" not in table:
        return {"gpu": hardware.reference(table["sm"]).name, "sm": table["sm"]}
    card = hardware.find(table["gpu"])
    if table.get("sm", card.sm) != card.sm:
        raise RecipeError(path, "sm", f"got {table['sm']}; {card.name} is SM {card.sm}, so allowed is {card.sm}")
    return {"gpu": card.name, "sm": card.sm}


def _unknown(key: str, allowed: tuple[str, ...]) -> str:
    return f"unknown key; nearest is {nearest(key, allowed)!r}; allowed are {', '.join(allowed)}"


def _require(path: Path, key: str, value: object, check: Check) -> None:
    if (allowed := check(value)) is not None:
        raise RecipeError(path, key, f"got {shown(value)}; {allowed}")


def _checked(path: Path, name: str, table: Mapping, checks: Mapping[str, Check]) -> dict:
    values = dict(table.get(name, {}))
    for key, value in values.items():
        if key not in checks:
            raise RecipeError(path, f"{name}.{key}", _unknown(key, tuple(checks)))
        _require(path, f"{name}.{key}", value, checks[key])
    return values


def _calibration(path: Path, table: Mapping) -> Calibration | None:
    if table["kind"] == CPU and "calibration" not in table:
        return None
    default = CPU_CALIBRATION if table["kind"] == CPU else Calibration()
    return replace(default, **_checked(path, "calibration", table, _CALIBRATION))


def _quality(path: Path, table: Mapping, default: QualityBudget) -> QualityBudget:
    given = {k: float(v) for k, v in _checked(path, "quality", table, _QUALITY).items()}
    return QualityBudget(**({f.name: getattr(default, f.name) for f in fields(default)} | given))


def lookahead_draft_len(window: int, ngram: int, verification: int) -> int:
    """Draft tokens per step of lookahead decoding: (N − 2) + (W − 1 + G)·(N − 1); 83 for the usual 7, 7, 7.

    Source: TensorRT-LLM's LookaheadDecodingConfig (calculateSpeculativeResource); its Llama example passes 83.
    """
    return 0 if ngram == 1 else (ngram - 2) + (window - 1 + verification) * (ngram - 1)


def _speculative(path: Path, table: Mapping) -> SpeculativeDecoding | None:
    name = "speculative_decoding"
    if name not in table:
        return None
    values = _checked(path, name, table, _SPECULATIVE)
    if "mode" not in values:
        raise RecipeError(path, f"{name}.mode", f"is missing; allowed is one of {', '.join(SPECULATIVE_KEYS)}")
    mode = values["mode"]
    for key in values:
        if key != "mode" and key not in SPECULATIVE_KEYS[mode]:
            allowed = ", ".join(SPECULATIVE_KEYS[mode])
            raise RecipeError(path, f"{name}.{key}", f"does not apply to mode {mode!r}; allowed are {allowed}")
    if mode == "lookahead_decoding":
        for key in SPECULATIVE_KEYS[mode]:
            if key not in values:
                raise RecipeError(path, f"{name}.{key}", "is missing; lookahead needs all three sizes, e.g. 7")
        values["max_draft_len"] = lookahead_draft_len(
            values["window_size"], values["ngram_size"], values["verification_set_size"]
        )
    elif "max_draft_len" not in values:
        raise RecipeError(
            path, f"{name}.max_draft_len", f"is missing; mode {mode!r} must say how many tokens it drafts"
        )
    return SpeculativeDecoding(**values)


def _options(path: Path, name: str, table: Mapping, programs: tuple[str, ...]) -> dict[str, object]:
    """Options passed on to a program; with several programs (one per model family) one of them must know the option."""
    values = dict(table.get(name, {}))
    for key, value in values.items():
        if key in _PATHS:
            raise RecipeError(path, f"{name}.{key}", "is chosen by the build; leave it out")
        if key in _OWN_KEY[name]:
            raise RecipeError(path, f"{name}.{key}", f"is set by the recipe's own key: {_OWN_KEY[name][key]}")
        if key == "cp_size" and value != 1:
            raise RecipeError(
                path, f"{name}.{key}", f"got {shown(value)}; allowed is 1: context parallelism is not offered"
            )
        if name == "build" and key in ("tp_size", "pp_size", "tp", "pp"):
            raise RecipeError(
                path, f"{name}.{key}", "trtllm-build has no such option (R33): set tp and pp on the recipe"
            )
        problems = [read_option_table(program).problem(key, value) for program in programs]
        if all(problems):
            raise RecipeError(path, f"{name}.{key}", problems[0])
    return values


def _environment(path: Path, table: Mapping) -> dict[str, str]:
    values = dict(table.get("environment", {}))
    for key, value in values.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            raise RecipeError(path, f"environment.{key}", "allowed is a name of letters, digits and '_'")
        if not isinstance(value, str) or "\0" in value:
            raise RecipeError(path, f"environment.{key}", f"got {shown(value)}; allowed is a string")
    return values
