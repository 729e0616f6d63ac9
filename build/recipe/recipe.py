"""A recipe: how one engine is made, read from ``build/recipes/<engine>.toml``.

``load`` checks form only: the keys, types and limits of ``schema.py``. Whether the combination works on the target GPU
is checked by the rules (``verdict.py``).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from build.base import hardware, layout
from build.base.json_fields import shown
from build.base.option_table import closest, nearest
from build.base.option_table import read as read_option_table
from build.recipe import schema
from build.recipe.schema import AUTO, CPU, IMAGE, KINDS, AdapterFolder, Calibration, CpuCalibration
from contract import toml_table
from contract.encoder import KINDS as ENCODERS
from contract.errors import InvalidArgument

MAX_ADAPTERS = 63  # entries of the head that carries an adapter's number in a CPU engine, less the one for none
MAX_NEAREST = 3  # names offered for one that is not there
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
FIRST_TRIED = "int8"


class RecipeError(InvalidArgument):
    """A recipe says something it may not. ``key`` names the entry (``calibration.size``), ``path`` the file."""

    def __init__(self, path: Path | str, key: str, problem: str) -> None:
        self.path = str(path)
        self.key = key
        file = str(layout.relative(Path(path)))
        super().__init__(f"{file}: {key[:128]}" if key else file, problem)


CPU_CALIBRATION = Calibration(**asdict(CpuCalibration()))


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
    draft: str | None = None
    draft_precision: str | None = None


@dataclass(frozen=True)
class QualityBudget:
    """Limits on how far an engine may differ from the bf16 reference on held-out text; beyond them it is not packaged.

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
    **dict.fromkeys(("bf16", "fp16", "fp32"), QualityBudget(1.01, 0.97, 0.01)),
    **dict.fromkeys(("fp8", "fp8_pc_pt"), QualityBudget(1.03, 0.92, 0.02)),
    **dict.fromkeys(("int8", "int8_wo"), QualityBudget(1.02, 0.95, 0.02)),
    "int8_sq": QualityBudget(1.05, 0.90, 0.06),
    **dict.fromkeys(("int4", "int4_wo"), QualityBudget(1.10, 0.85, 0.10)),
    "int4_awq": QualityBudget(1.08, 0.86, 0.06),
    "w4a8_awq": QualityBudget(1.10, 0.85, 0.10),
    "nvfp4": QualityBudget(1.08, 0.86, 0.06),
}


@dataclass(frozen=True)
class Recipe:
    """One engine to build: a recipe file with every default filled in. ``docs/recipes.md`` explains each key.

    max_seq_len: None only when a trtllm recipe leaves it out (rule R11 refuses it).
    automatic: the build chooses precision, head_precision and kv_cache_precision by measuring (precision "auto").
    kv_cache_measured: the build chooses kv_cache_precision of MEASURED_KV; until then it is the first of them.
    calibration: None for CPU weights that are rounded to nearest.
    kv_cache_tokens: the KV pool on the CPU; on a GPU its upper limit, or None.
    gpu, sm: both set for the GPU kinds, of which the file gives one or both; None and 0 on the CPU.
    given: keys the file sets itself, so that one without effect is refused even where it repeats its default.
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
    kv_cache_measured: bool = False
    kv_cache_tokens: int | None = None
    kv_cache_fraction: float = 0.9
    gpu: str | None = None
    sm: int = 0
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
    adapters: tuple[AdapterFolder, ...] = ()
    adapter_cache: int | None = None
    given: tuple[str, ...] = field(default=(), repr=False, compare=False)

    @property
    def world_size(self) -> int:
        """Ranks, one GPU each."""
        return self.tp * self.pp

    @property
    def texts(self) -> Calibration:
        """The calibration of a recipe that has one, as every recipe of a GPU kind does."""
        assert self.calibration is not None
        return self.calibration

    def reuse_features(self) -> list[str]:
        """What it asks for of what needs paged context attention."""
        return ["prefix reuse"] * self.prefix_reuse + ["chunked context"] * self.chunked_context

    def changed(self, **changes: Any) -> Recipe:
        """The same recipe with other values."""
        return replace(self, **changes)


# Options the recipe has its own keys for: one value, one home.
_OF_BOTH = {  # quantize.py and convert_checkpoint.py
    "tp_size": "tp",
    "pp_size": "pp",
    "calib_dataset": "calibration.dataset",
    "calib_size": "calibration.size",
    "calib_max_seq_length": "calibration.max_seq_length",
}
_OWN_KEY = {
    "build": {key: key for key in ("max_batch_size", "max_num_tokens", "max_seq_len", "max_beam_width")}
    | {
        "max_decoder_seq_len": "max_seq_len",
        "speculative_decoding_mode": "speculative_decoding.mode",
        "max_draft_len": "speculative_decoding.max_draft_len",
    },
    "quantize": _OF_BOTH
    | {
        "qformat": "precision",
        "kv_cache_dtype": "kv_cache_precision",
        "batch_size": "calibration.batch_size",
        "awq_block_size": "group_size",
        "max_draft_len": "speculative_decoding.max_draft_len",
        "num_medusa_heads": "speculative_decoding.num_medusa_heads",
        "medusa_model_dir": "speculative_decoding.medusa_model",
    },
    "convert": _OF_BOTH | {"group_size": "group_size"},
}
_PROGRAMS = {
    "build": ("trtllm_build",),
    "quantize": ("quantize",),
    "convert": ("convert_checkpoint_llama", "convert_checkpoint_qwen"),
}
_PATHS = ("checkpoint_dir", "model_dir", "output_dir")  # the plan's own


def name_for(model: str) -> str:
    """The engine's name where only its model is given: the last part of a path or hub id."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name.removesuffix(".gguf")).strip(".-_")


def named(engine: str) -> Recipe:
    """The recipe ``build/recipes/<engine>.toml``; RecipeError as ``load``, InvalidArgument for what is no name."""
    if not NAME.fullmatch(engine):
        raise InvalidArgument("engine", f"must be a name of letters, digits, '.', '_' and '-', got {shown(engine)}")
    return load(layout.RECIPES / f"{engine}.toml")


def load(path: Path | str) -> Recipe:
    """Reads one recipe of a generating model; raises as ``read``."""
    return parse(read(path), path)


def read(path: Path | str) -> dict[str, object]:
    """The table of one recipe file. Raises RecipeError, as ``parse`` and ``encoder`` do for what it may not hold."""
    path = Path(path)
    if not path.exists():
        known = [p.stem for p in sorted(path.parent.glob("*.toml"))]
        near = ", ".join(repr(name) for name in closest(path.stem, known, MAX_NEAREST))
        where = f"`ls {shlex.quote(str(layout.relative(path.parent)))}` lists all {len(known)}"
        listed = f"nearest is {near}; {where}" if known else "the folder has none"
        raise RecipeError(path, "", f"there is no such recipe; {listed}")
    try:
        return toml_table.read(path)
    except InvalidArgument as exc:
        raise RecipeError(path, "", exc.problem) from exc


def parse(table: Mapping[str, object], path: Path | str) -> Recipe:
    """The recipe inside a TOML table; ``path`` gives it its name and stands in its errors."""
    path = Path(path)
    declared = _declared(table, path)
    if isinstance(declared, schema.EncoderRecipe):
        raise RecipeError(path, "kind", f"must be one of {', '.join(KINDS)} here, got {declared.kind!r}")
    names = {entry.name for entry in fields(Recipe)}
    values = {key: value for key, value in declared if key in names}
    values |= {"name": path.stem, "given": tuple(table)}
    adapters = [adapter.name for adapter in declared.adapters]
    if len(adapters) > MAX_ADAPTERS:
        raise RecipeError(path, "adapters", f"must be at most {MAX_ADAPTERS} tables, got {len(adapters)}")
    if repeated := next((name for name in adapters if adapters.count(name) > 1), None):
        raise RecipeError(path, "adapters", f"must have different names, got {repeated!r} twice")
    if isinstance(declared, schema.CpuRecipe):
        values |= _chosen(path, table, declared)
    else:
        values |= _card(path, declared) | {"environment": _environment(path, declared.environment)}
    if isinstance(declared, schema.CpuRecipe | schema.TrtllmRecipe):
        values["speculative_decoding"] = _speculative(declared.speculative_decoding)
    if isinstance(declared, schema.TrtllmRecipe):
        for name, programs in _PROGRAMS.items():
            values[name] = _options(path, name, values[name], programs)
    changed = declared.quality.model_dump(exclude_none=True) if declared.quality else {}
    values["quality"] = replace(DEFAULT_QUALITY[str(values["precision"])], **changed)
    return Recipe(**values)


def encoder(table: Mapping[str, object], path: Path | str) -> schema.EncoderRecipe:
    """The recipe of an encoder inside a TOML table; as ``parse``."""
    path = Path(path)
    declared = _declared(table, path)
    if not isinstance(declared, schema.EncoderRecipe):
        raise RecipeError(path, "kind", f"must be one of {', '.join(ENCODERS)} here, got {declared.kind!r}")
    return declared.model_copy(update={"name": path.stem})


def _declared(
    table: Mapping[str, object], path: Path
) -> schema.CpuRecipe | schema.TrtllmRecipe | schema.LlmapiRecipe | schema.EncoderRecipe:
    kind = schema.RECIPE_TABLES.get(str(table.get("kind")))
    if (key := next((key for key in table if key not in schema.KEYS), None)) is not None:
        raise RecipeError(path, key, _unknown(key, tuple(schema.fields_of(kind)) if kind else schema.KEYS))
    drafting = table.get("speculative_decoding")
    for key in drafting if isinstance(drafting, Mapping) else ():
        if key not in schema.SPECULATIVE_KEYS:
            raise RecipeError(path, f"speculative_decoding.{key}", _unknown(key, schema.SPECULATIVE_KEYS))
    try:
        declared = schema.FILE.validate_python(dict(table))
    except ValidationError as exc:
        raise _refusal(path, table, exc) from exc
    if not NAME.fullmatch(path.stem):
        problem = f"a recipe's file name must be letters, digits, '.', '_' and '-', got {path.stem!r}"
        raise RecipeError(path, "name", problem)
    if declared.name not in (None, path.stem):
        raise RecipeError(path, "name", f"must be the file's name, {path.stem!r}, got {shown(declared.name)}")
    return declared


def _unknown(key: str, known: tuple[str, ...]) -> str:
    return f"unknown key; nearest is {nearest(key, known)!r}; must be one of {', '.join(known)}"


def _refusal(path: Path, table: Mapping[str, object], error: ValidationError) -> RecipeError:
    """The first problem that pydantic found, keys that do not belong before values, in our words."""
    problems = error.errors(include_url=False, include_context=False)
    first = min(problems, key=lambda entry: entry["type"] not in ("extra_forbidden", "unexpected_keyword_argument"))
    keys = tuple(str(part) for part in first["loc"][1:])  # without the kind
    declared: type = schema.RECIPE_TABLES.get(str(table.get("kind")), schema.AnyRecipe)
    if keys[:1] == ("matryoshka_dimensions",):  # without the place in the list
        keys = keys[:1]
    elif keys[:1] == ("speculative_decoding",) and len(keys) > 1:
        declared, keys = schema.MODES[keys[1]], (keys[0], *keys[2:])  # without the mode
    elif len(keys) > 1:
        of_kind = CpuCalibration if table["kind"] == CPU else Calibration
        declared = {"quality": schema.Quality, "adapters": AdapterFolder}.get(keys[0], of_kind)
    if first["type"].startswith("union_tag") or keys == ("speculative_decoding", "mode"):
        keys = keys[:1]
        drafting = schema.SPECULATIVE_TABLES.get(str(table.get("kind")), ())
        modes = tuple(mode for mode, of in schema.MODES.items() if of in drafting)
        key, tags = ("mode", modes) if keys else ("kind", (*KINDS, *ENCODERS))
        holder = table[keys[0]] if keys else table
        assert isinstance(holder, Mapping)
        return RecipeError(path, ".".join((*keys, key)), _must_be(f"one of {', '.join(tags)}", holder, key, tags))
    key, known = keys[-1], schema.fields_of(declared)
    name = ".".join(keys)
    if keys[0] == "adapters" and declared is not schema.EncoderRecipe and len(keys) < 3:
        return RecipeError(path, name, f"must be tables, [[adapters]], got {shown(first['input'])}")
    if key not in known:
        problem = _unknown(key, tuple(known))
        if len(keys) == 1:
            kinds = [kind for kind, other in schema.RECIPE_TABLES.items() if key in schema.fields_of(other)]
            problem = f"does not apply to kind {table['kind']!r}; it belongs to {' and '.join(kinds)}"
        elif declared in schema.MODES.values():
            problem = f"does not apply to mode {first['loc'][2]!r}; must be one of {', '.join(known)}"
        return RecipeError(path, name, problem)
    limit = schema.limit(known[key])
    must_be = limit.must_be if limit else f"a table: [{name}]"
    holder = {} if first["type"] == "missing" else {key: first["input"]}
    return RecipeError(path, name, _must_be(must_be, holder, key, limit.names if limit else ()))


def _must_be(must_be: str, holder: Mapping[str, object], key: str, names: tuple[str, ...]) -> str:
    """``must be …, got …``, with the nearest of ``names`` to a wrong one; or that the key is missing."""
    if key not in holder:
        return f"is missing; must be {must_be}"
    value = holder[key]
    near = f"; nearest is {nearest(value[:128].lower(), names)!r}" if names and isinstance(value, str) and value else ""
    return f"must be {must_be}, got {shown(value)}{near}"


def _chosen(path: Path, table: Mapping[str, object], declared: schema.CpuRecipe) -> dict[str, object]:
    """What of a CPU recipe is not as the file has it: precision "auto" is the first setting that is tried."""
    names = [adapter.name for adapter in declared.adapters]
    if isinstance(declared.speculative_decoding, schema.DraftModel) and names:
        problem = "must be left out with speculative_decoding.mode 'draft_model', whose draft knows none; got"
        raise RecipeError(path, "adapters", f"{problem} {', '.join(names)}")
    precision, kv_cache = declared.precision, {}
    if declared.kv_cache_precision == AUTO:  # arithmetic in f32, and adapters, are not measured with another
        measured = precision != "fp32" and not names
        kv_cache = {"kv_cache_precision": schema.MEASURED_KV[0], "kv_cache_measured": measured}
    if precision == AUTO:
        for key in ("kv_cache_precision", "head_precision", "calibration", "group_size"):
            if key in table:
                raise RecipeError(path, key, f"does not go with precision {AUTO!r}, which chooses it; leave it out")
        return kv_cache | {"precision": FIRST_TRIED, "automatic": True}
    if declared.head_precision != "int8" and precision not in ("int8", "int8_sq", "int4"):
        problem = f"has no effect on {precision} weights, whose embedding and lm_head are {precision} too; leave it out"
        raise RecipeError(path, "head_precision", problem)
    calibration = declared.calibration
    return kv_cache | {"calibration": Calibration(**asdict(calibration)) if calibration else None}


def _card(path: Path, declared: schema.GpuRecipe) -> dict[str, object]:
    """``gpu`` and ``sm``, each found from the other where the file has one."""
    if declared.gpu is None and declared.sm is None:
        raise RecipeError(path, "gpu", "is missing; name the target card (gpu) or its compute capability (sm, e.g. 90)")
    if declared.gpu is None:
        return {"gpu": hardware.reference(int(declared.sm or 0)).name}
    card = hardware.find(declared.gpu)
    if declared.sm not in (None, card.sm):
        raise RecipeError(path, "sm", f"must be {card.sm}, the SM of {card.name}, got {declared.sm}")
    return {"gpu": card.name, "sm": card.sm}


def lookahead_draft_len(window: int, ngram: int, verification: int) -> int:
    """(N − 2) + (W − 1 + G)·(N − 1) draft tokens per step, 83 for the usual 7, 7, 7: TensorRT-LLM's
    LookaheadDecodingConfig (calculateSpeculativeResource); its Llama example passes 83."""
    return 0 if ngram == 1 else (ngram - 2) + (window - 1 + verification) * (ngram - 1)


def _speculative(declared: schema.CpuSpeculative | schema.Speculative | None) -> SpeculativeDecoding | None:
    if declared is None:
        return None
    values = declared.model_dump()
    if isinstance(declared, schema.Lookahead):
        sizes = declared.window_size, declared.ngram_size, declared.verification_set_size
        values["max_draft_len"] = lookahead_draft_len(*sizes)
    return SpeculativeDecoding(**values)


def _options(path: Path, name: str, values: dict[str, object], programs: tuple[str, ...]) -> dict[str, object]:
    """Options passed on to a program; with several programs (one per model family) one of them must know the option."""
    for key, value in values.items():
        problems = [read_option_table(program).problem(key, value) for program in programs]
        problem = problems[0] if all(problems) else None
        if key in _PATHS:
            problem = "is chosen by the build; leave it out"
        elif key in _OWN_KEY[name]:
            problem = f"is set by the recipe's own key: {_OWN_KEY[name][key]}"
        elif key == "cp_size" and value != 1:
            problem = f"must be 1 (no context parallelism), got {shown(value)}"
        elif name == "build" and key in ("tp_size", "pp_size", "tp", "pp"):
            problem = "trtllm-build has no such option (R33): set tp and pp on the recipe"
        if problem is not None:
            raise RecipeError(path, f"{name}.{key}", problem)
    return values


def _environment(path: Path, values: Mapping[str, object]) -> dict[str, str]:
    for key, value in values.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            raise RecipeError(path, f"environment.{key}", "must be a name of letters, digits and '_'")
        if not isinstance(value, str) or "\0" in value:
            raise RecipeError(path, f"environment.{key}", f"must be a string, got {shown(value)}")
    return {key: str(value) for key, value in values.items()}
