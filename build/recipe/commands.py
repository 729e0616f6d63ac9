"""The command lines of a GPU build, as argument lists: fetch, checkpoint (quantise or convert), compile.

Everything here is pure: what a recipe asks for goes in, arguments come out. Paths are relative to the repository
root, which is the working folder both here and in the container, so a printed line can be typed in either.
What a program would change silently (rules R1, R3, R6, R8, R12, R20) is written out as it will be.
"""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from build.base import layout, option_table
from build.base.shape import Shape, is_hub_id, local_folder
from build.model import lora_adapter
from build.model.calibration import CPYTHON
from build.recipe.quantization import AWQ_CALIB_SIZE, HF, HF_QFORMATS, QFORMATS, Quantization
from build.recipe.recipe import Recipe
from build.recipe.schema import CPU, LLMAPI, TRTLLM

QUANTIZE, CONVERT = "quantize", "convert"
QUANT_ALGO = {"bf16" if qformat == "full_prec" else qformat: algo for qformat, (_, algo) in QFORMATS.items()}
QUANT_ALGO["nvfp4"] = "NVFP4"
PAGED_WITH_QUANTISED_KV = {"FP8", "W4A8_AWQ", "NVFP4"}  # rule R1
FUSED_MLP = {None, "FP8", "MIXED_PRECISION"}  # rule R6
# An option of [convert] that turns a precision quantize.py would make into one convert_checkpoint.py makes.
CONVERT_SWITCH = {"int8_sq": "smoothquant", "fp8_pc_pt": "use_fp8_rowwise", "fp8": "use_fp8"}
CONVERT_SWITCH |= {"int4_awq": "use_weight_only"}
# What adapters change: PEFT's names, and TensorRT-LLM's in the order of their ids, from 1.
PROJECTIONS = "q_proj k_proj v_proj o_proj gate_proj down_proj up_proj".split()
LORA_MODULES = "attn_q attn_k attn_v attn_dense mlp_h_to_4h mlp_4h_to_h mlp_gate".split()
# Modes whose draft heads are in the checkpoint, and how the architecture in its config.json then begins.
HEADS = {"eagle": "Eagle", "medusa": "Medusa", "explicit_draft_tokens": "ReDrafter"}
# Options of quantize.py and convert_checkpoint.py that make what build/quantise/trtllm_checkpoint.py does not read.
UNREAD = {
    QUANTIZE: ("quantize_lm_head", "autoq_format"),
    CONVERT: ("smoothquant", "use_qserve", "use_nvfp4", "use_meta_fp8_rowwise_recipe"),
}
MOUNT = "/trident"
# From the repository root: serving has one environment, torch and ModelOpt another (build/quantise/environment.py).
PYTHON, BUILD_PYTHON = ".venv/bin/python", ".venv-build/bin/python"
IMAGE_PATH = "/opt/venv-tritonserver/bin"  # where the 26.04–26.07 images keep tensorrt_llm and trtllm-build


def checkpoint_route(recipe: Recipe, shape: Shape) -> str:
    """QUANTIZE (quantize.py, calibrated) or CONVERT (convert_checkpoint.py)."""
    if recipe.precision == "bf16":
        return CONVERT
    if recipe.precision in ("int8_wo", "int4_wo"):
        # Only Llama's converter can write an FP8 KV cache (R34); quantize.py then only sets the algorithm (R22).
        return QUANTIZE if shape.architecture.family == "qwen" and recipe.kv_cache_precision == "fp8" else CONVERT
    return CONVERT if recipe.convert.get(CONVERT_SWITCH.get(recipe.precision, "")) else QUANTIZE


def put_in_place(recipe: Recipe, shape: Shape) -> bool:
    """Whether a person puts the checkpoint in place, because no stage writes its draft heads (rule U2)."""
    mode = draft_mode(recipe)
    return mode in HEADS and not (mode == "medusa" and checkpoint_route(recipe, shape) == QUANTIZE)


def unmeasured(recipe: Recipe, shape: Shape) -> str | None:
    """What of the recipe makes a checkpoint that verify cannot read (rule Q4), or None."""
    if recipe.kind != TRTLLM:
        return None
    if draft_mode(recipe) in HEADS:
        return f"speculative_decoding.mode {draft_mode(recipe)!r}"
    if recipe.pp > 1:
        return f"pp {recipe.pp}"
    if recipe.precision == "nvfp4":
        return "precision 'nvfp4'"
    route = checkpoint_route(recipe, shape)
    options = (quantize_options if route == QUANTIZE else convert_options)(recipe, shape)
    return next((f"{route}.{key} {options[key]!r}" for key in UNREAD[route] if options.get(key)), None)


def draft_mode(recipe: Recipe) -> str | None:
    """How draft tokens are made, None where none are."""
    return recipe.speculative_decoding.mode if recipe.speculative_decoding else None


def calibrates(recipe: Recipe, shape: Shape) -> bool:
    """Whether activations are measured on the recipe's [calibration] texts on the way to its checkpoint."""
    if recipe.kind == CPU:
        return recipe.calibration is not None
    if recipe.kind == LLMAPI:
        return recipe.precision != "bf16" or recipe.kv_cache_precision != "auto"
    if checkpoint_route(recipe, shape) == QUANTIZE:
        return True
    # The converters load the texts for SmoothQuant and for an INT8 KV cache.
    return recipe.precision == "int8_sq" or recipe.kv_cache_precision == "int8"


def calibration_size(recipe: Recipe) -> int:
    """Texts really used: any AWQ format clamps to 32."""
    return min(recipe.texts.size, AWQ_CALIB_SIZE) if "awq" in recipe.precision else recipe.texts.size


def paged_context_fmha(recipe: Recipe) -> bool:
    """Whether the engine keeps paged context attention, which KV reuse and chunked context need (R1, R3)."""
    if "disable" in (recipe.build.get("use_paged_context_fmha"), recipe.build.get("context_fmha")):
        return False
    if recipe.kv_cache_precision == "auto":
        return True
    keeps = recipe.kv_cache_precision != "int8" and QUANT_ALGO[recipe.precision] in PAGED_WITH_QUANTISED_KV
    return keeps and recipe.sm >= 89


def fp8_context_fmha(recipe: Recipe) -> bool:
    """Whether context attention runs in FP8: exactly with an FP8 KV cache and paged context (R2, R3)."""
    return recipe.kv_cache_precision == "fp8" and paged_context_fmha(recipe)


def fused_mlp(recipe: Recipe) -> bool:
    return QUANT_ALGO[recipe.precision] in FUSED_MLP and recipe.build.get("use_fused_mlp") != "disable"


def tokens_per_block(recipe: Recipe) -> int:
    size = recipe.build.get("tokens_per_block", 32)
    return size if isinstance(size, int) else 32


def max_num_tokens(recipe: Recipe) -> int:
    """The limit the engine really gets (R12): not above all sequences at full length, not below one block."""
    length = recipe.max_num_tokens if recipe.max_seq_len is None else recipe.max_seq_len
    return max(min(recipe.max_num_tokens, length * recipe.max_batch_size), tokens_per_block(recipe))


def draft_len(recipe: Recipe) -> int:
    """Draft tokens beside each sequence in its KV cache; none on the CPU, where they have a cache of their own."""
    return recipe.speculative_decoding.max_draft_len if recipe.speculative_decoding and recipe.kind != CPU else 0


def build_options(recipe: Recipe, shape: Shape) -> dict[str, object]:
    """Options of trtllm-build in the order they are printed; the recipe's [build] wins."""
    algo, llama = QUANT_ALGO[recipe.precision], shape.architecture.name == "LlamaForCausalLM"
    fp8, switch = algo == "FP8", {True: "enable", False: "disable"}
    options: dict[str, object] = {
        "checkpoint_dir": _path(layout.checkpoint(recipe.name)),
        "output_dir": _path(layout.compiled(recipe.name)),
        "max_batch_size": recipe.max_batch_size,
        "max_num_tokens": max_num_tokens(recipe),
        **({} if recipe.max_seq_len is None else {"max_seq_len": recipe.max_seq_len}),
        "max_beam_width": recipe.max_beam_width,
        "kv_cache_type": "paged",
        "remove_input_padding": "enable",
        "context_fmha": "enable",
        "gpt_attention_plugin": "auto",
        "gemm_plugin": "auto" if recipe.precision in ("bf16", "int4_awq") else "disable",
        "use_paged_context_fmha": switch[paged_context_fmha(recipe)],
        "use_fp8_context_fmha": switch[fp8_context_fmha(recipe)],
        "multiple_profiles": switch[recipe.multiple_profiles],
        "use_fused_mlp": switch[fused_mlp(recipe)],
    }
    if llama and recipe.tp > 1:
        options["reduce_fusion"] = "enable"
        if fp8:
            options["user_buffer"] = "enable"
    if fp8 and fused_mlp(recipe) and recipe.sm == 90 and not recipe.adapters:  # the plugin has no LoRA
        swiglu = "low_latency_gemm_swiglu_plugin" if recipe.optimize_for == "latency" else "gemm_swiglu_plugin"
        options[swiglu] = "fp8"
    if fp8 and recipe.sm < 100 and recipe.optimize_for == "latency":
        options["low_latency_gemm_plugin"] = "fp8"
    if recipe.speculative_decoding is not None:
        options["speculative_decoding_mode"] = recipe.speculative_decoding.mode
        options["max_draft_len"] = recipe.speculative_decoding.max_draft_len
    options |= {"logits_dtype": "float32", "workers": recipe.world_size}
    if recipe.adapters:
        modules, rank = lora_modules(recipe)
        options |= {"lora_plugin": "auto", "lora_target_modules": modules, "max_lora_rank": rank}
    forced = {"use_paged_context_fmha", "use_fp8_context_fmha", "use_fused_mlp"}  # the builder decides these
    return options | {key: value for key, value in recipe.build.items() if key not in forced}


def lora_modules(recipe: Recipe) -> tuple[list[str], int]:
    """TensorRT-LLM's names of what the adapters change, q, k and v all or none, and the widest rank."""
    ranks = [rank for a in recipe.adapters for rank in lora_adapter.ranks(a.name, a.path).items()]
    changed = {LORA_MODULES[PROJECTIONS.index(projection)] for projection, _ in ranks}
    changed |= set(LORA_MODULES[:3]) if changed & set(LORA_MODULES[:3]) else set()
    return [module for module in LORA_MODULES if module in changed], max(rank for _, rank in ranks)


def dtype(recipe: Recipe, shape: Shape) -> str:
    """Type of the checkpoint; ``auto`` takes the source's, and float16 for a float32 one (R26)."""
    options = recipe.quantize if checkpoint_route(recipe, shape) == QUANTIZE else recipe.convert
    given = str(options.get("dtype", "bfloat16"))
    of_auto = "bfloat16" if shape.source_dtype == "bfloat16" else "float16"
    return of_auto if given == "auto" else given


def quantize_options(recipe: Recipe, shape: Shape) -> dict[str, object]:
    """Options of quantize.py; the recipe's [quantize] wins."""
    options = _format_options(recipe, recipe.precision) | _calibration_options(recipe)
    options |= {"tokenizer_max_seq_length": 2 * recipe.texts.max_seq_length, "tp_size": recipe.tp, "pp_size": recipe.pp}
    spec = recipe.speculative_decoding
    if spec is not None and spec.mode == "medusa":
        options |= {"max_draft_len": spec.max_draft_len}
        options |= {"num_medusa_heads": spec.num_medusa_heads} if spec.num_medusa_heads else {}
        options |= {"medusa_model_dir": model_dir(spec.medusa_model)} if spec.medusa_model else {}
    options["output_dir"] = _path(layout.checkpoint(recipe.name))
    given = dict(recipe.quantize)
    if recipe.precision != "fp8":
        given.pop("quantize_lm_head", None)  # R23: only fp8 can
    return options | given


def _format_options(recipe: Recipe, qformat: str) -> dict[str, object]:
    options: dict[str, object] = {"model_dir": model_dir(recipe.model, recipe.revision)}
    options |= {"dtype": "bfloat16", "qformat": qformat}
    if recipe.kv_cache_precision != "auto":
        options["kv_cache_dtype"] = recipe.kv_cache_precision
    if "awq" in qformat:
        options["awq_block_size"] = recipe.group_size
    return options


def _calibration_options(recipe: Recipe) -> dict[str, object]:
    texts = recipe.texts
    options = {"calib_dataset": texts.dataset, "calib_size": calibration_size(recipe), "batch_size": texts.batch_size}
    return {**options, "calib_max_seq_length": texts.max_seq_length}


def convert_options(recipe: Recipe, shape: Shape) -> dict[str, object]:
    """Options of the family's convert_checkpoint.py; the recipe's [convert] wins."""
    options: dict[str, object] = {"model_dir": model_dir(recipe.model, recipe.revision), "dtype": "bfloat16"}
    if recipe.precision in ("int8_wo", "int4_wo"):
        options |= {"use_weight_only": True, "weight_only_precision": recipe.precision[:4]}
    if recipe.precision == "int8_sq":
        options |= {"smoothquant": 0.5, "per_channel": True, "per_token": True}
    if recipe.precision == "int8_sq" or recipe.kv_cache_precision == "int8":
        options["calib_dataset"] = recipe.texts.dataset
    if recipe.precision == "int4_awq":
        options |= {"weight_only_precision": "int4_awq", "group_size": recipe.group_size}
    if recipe.kv_cache_precision != "auto":
        options[f"{recipe.kv_cache_precision}_kv_cache"] = True
    options |= {"tp_size": recipe.tp, "pp_size": recipe.pp, "output_dir": _path(layout.checkpoint(recipe.name))}
    return options | dict(recipe.convert)


def fetch(recipe: Recipe) -> list[str] | None:
    """Downloads a hub model; None for a local folder. The CPU driver reads the hub's own cache; the programs of the
    image read a folder, which is therefore named."""
    if not is_hub_id(recipe.model):
        return None
    argv = [PYTHON, "-m", "build.base.fetch", recipe.model]
    argv += ["--revision", recipe.revision] if recipe.revision else []
    return argv if recipe.kind == CPU else [*argv, "--into", model_dir(recipe.model, recipe.revision)]


def checkpoint(recipe: Recipe, shape: Shape) -> list[str]:
    """Makes the TensorRT-LLM checkpoint: in the image on a machine with a GPU (R19), or anywhere by our own stage."""
    if calibrates_here(recipe, shape):
        return checkpoint_on_cpu(recipe)
    quantizes = checkpoint_route(recipe, shape) == QUANTIZE
    table = option_table.read("quantize" if quantizes else f"convert_checkpoint_{shape.architecture.family}")
    options = (quantize_options if quantizes else convert_options)(recipe, shape)
    return ["python3", table.path_in_image, *table.arguments(options)]


def calibrates_here(recipe: Recipe, shape: Shape) -> bool:
    """Whether the recipe calibrates on texts that only our own quantise stage reads (build.quantise.quantize)."""
    return recipe.kind == TRTLLM and checkpoint_route(recipe, shape) == QUANTIZE and recipe.texts.dataset == CPYTHON


def problem_on_cpu(recipe: Recipe) -> str | None:
    """Why build.quantise.quantize cannot make the recipe's checkpoint, or None."""
    qformat = qformat_here(recipe)
    if qformat not in (HF_QFORMATS if recipe.kind == LLMAPI else QFORMATS):
        return f"does not make {recipe.precision}"
    if QFORMATS[qformat][0] is None and recipe.kv_cache_precision != "auto":
        return f"measures no activations for {recipe.precision}, so no {recipe.kv_cache_precision} KV cache"
    if recipe.kind == LLMAPI:
        return None  # the LLM API splits over ranks when it loads
    if recipe.pp > 1:
        return f"splits by tensor only, not over {recipe.pp} pipeline ranks"
    if draft_mode(recipe) in HEADS:
        return f"writes no draft heads of mode {draft_mode(recipe)!r}"
    if recipe.convert:
        return "does not know [convert]"
    unknown = sorted(_own_options(recipe).keys() - Quantization.__dataclass_fields__.keys())
    return f"has no option {unknown[0]}" if unknown else None


def _own_options(recipe: Recipe) -> dict[str, object]:
    """[quantize] without what our own stage has no use for: it cuts texts by calibration.max_seq_length alone."""
    return {key: value for key, value in recipe.quantize.items() if key != "tokenizer_max_seq_length"}


def qformat_here(recipe: Recipe) -> str:
    return "full_prec" if recipe.precision == "bf16" else recipe.precision


def checkpoint_on_cpu(recipe: Recipe) -> list[str]:
    """Makes the same checkpoint in the build environment that holds ModelOpt, with a GPU or without."""
    qformat = qformat_here(recipe)
    options = _format_options(recipe, qformat)
    if qformat not in QFORMATS or QFORMATS[qformat][0] is not None:
        options |= _calibration_options(recipe)
    options |= {"checkpoint_format": HF} if recipe.kind == LLMAPI else {"tp_size": recipe.tp}
    options |= {"output_dir": _path(layout.checkpoint(recipe.name))} | _own_options(recipe)
    given = (part for key, value in options.items() for part in (f"--{key}", str(value)))
    return [BUILD_PYTHON, "-m", "build.quantise.quantize", *given]


def compile_engine(recipe: Recipe, shape: Shape) -> list[str]:
    """Compiles the checkpoint; to be run in the image on a machine with a GPU (R30)."""
    table = option_table.read("trtllm_build")
    return [table.path_in_image, *table.arguments(build_options(recipe, shape))]


def verify(recipe: Recipe) -> list[str]:
    """Scores the quantised checkpoint against the bf16 model, on held-out text, in simulated numerics."""
    return [PYTHON, "-m", "build.quality.evaluation", "--engine", recipe.name]


def build_engine(recipe: Recipe) -> list[str]:
    """Every stage from fetch to the manifest, by the driver; all there is for kinds without programs of their own."""
    return [PYTHON, "-m", "build.engine", "--engine", recipe.name]


def in_docker(argv: Sequence[str], recipe: Recipe) -> list[str]:
    """``argv`` inside the recipe's image, with the repository mounted as the working folder."""
    mounts = _each("-v", [f"{layout.ROOT}:{MOUNT}", *(f"{folder}:{folder}:ro" for folder in _outside(recipe))])
    run = "docker run --rm --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864".split()
    return [*run, *mounts, "-w", MOUNT, *_each("-e", _environment(recipe)), recipe.image, *_entered(argv)]


def enroot_import(recipe: Recipe) -> list[str]:
    """Makes the image an enroot file, once."""
    host, _, name = recipe.image.partition("/")
    registry = name and ("." in host or ":" in host or host == "localhost")  # else it is of Docker Hub
    image = f"{host}#{name}" if registry else recipe.image
    return ["enroot", "import", "-o", _path(enroot_image(recipe)), f"docker://{image}"]


def enroot_image(recipe: Recipe) -> Path:
    return layout.ROOT / ".cache" / f"{recipe.image.rsplit('/', 1)[-1].replace(':', '-')}.sqsh"


def in_enroot(argv: Sequence[str], recipe: Recipe) -> list[str]:
    """``argv`` inside the imported image; enroot starts in its own folder, so the shell changes to ours first."""
    mounts = _each("--mount", [f"{layout.ROOT}:{MOUNT}", *(f"{folder}:{folder}" for folder in _outside(recipe))])
    run = ["enroot", "start", "--rw", *mounts, *_each("--env", _environment(recipe)), _path(enroot_image(recipe))]
    return [*run, *_entered(argv, f"cd {MOUNT}; ")]


def line(argv: Sequence[str]) -> str:
    """One line that a shell reads back as ``argv``."""
    return shlex.join(argv)


def model_dir(model: str, revision: str | None = None) -> str:
    """Where the plan's commands find a model's files."""
    if is_hub_id(model):
        return _path(layout.fetched_model(model, revision))
    return _path(local_folder(model) or Path(model))


def _entered(argv: Sequence[str], first: str = "") -> list[str]:
    """The image keeps its Python environment off the default path."""
    return ["bash", "-c", f'{first}export PATH={IMAGE_PATH}:$PATH; exec "$@"', "bash", *argv]


def _environment(recipe: Recipe) -> list[str]:
    """HF_TOKEN is passed on by name, so its value never stands in a printed line."""
    return ["HF_TOKEN", *(f"{key}={value}" for key, value in recipe.environment.items())]


def _each(flag: str, values: Sequence[str]) -> list[str]:
    return [part for value in values for part in (flag, value)]


def _outside(recipe: Recipe) -> list[Path]:
    """Local folders the commands read that lie outside the repository."""
    names = [recipe.model, recipe.texts.dataset] if recipe.kind == TRTLLM else [recipe.model]
    folders = [folder for name in names if (folder := local_folder(name)) is not None]
    return [folder for folder in folders if not folder.is_relative_to(layout.ROOT)]


def _path(path: Path) -> str:
    return str(layout.relative(path))


def exporter() -> str:
    """``optimum-intel==2.2.0``, as requirements/build.txt pins what exports graphs."""
    return _pinned("optimum-intel")


def modelopt() -> str:
    """``nvidia-modelopt==0.37.0``, torch and transformers, as requirements/build.txt pins what quantises."""
    return _pinned("nvidia-modelopt", "torch", "transformers")


def _pinned(*packages: str) -> str:
    text = (layout.ROOT / "requirements" / "build.txt").read_text(encoding="utf-8")
    pinned = (re.search(rf"(?<!\S){package}==\S+", text) for package in packages)
    return " ".join(found.group() if found else "unknown" for found in pinned)
