"""Rules R1 to R37: what TensorRT-LLM 1.2.1 refuses, drops silently or changes silently, checked before a build starts.

``RULES.check(case)`` gives every reason. They speak of kind ``trtllm`` only. Where a rule and the command line meet,
``commands.py`` writes what will really happen. What R28, R29 and R33 say, options that vanish, switches without a value
and ranks of a checkpoint, ``recipe.py`` refuses when it reads the file and ``package/compile_trtllm.py`` on the disk.
"""

import csv
import json
from pathlib import Path

from build.base import hardware, option_table
from build.base.shape import local_folder
from build.recipe import commands
from build.recipe.case import Case, RuleBook, Severity
from build.recipe.quantization import AWQ_CALIB_SIZE, TRTLLM, awq_problem

REFUSE, WARN, INFORM = Severity.REFUSE, Severity.WARN, Severity.INFORM
RULES = RuleBook()
refuse, warn, inform = RULES.rows(REFUSE), RULES.rows(WARN), RULES.rows(INFORM)

FUSED_SWIGLU = ("gemm_swiglu_plugin", "low_latency_gemm_swiglu_plugin")
NOT_ON_SM100 = (*FUSED_SWIGLU, "fp8_rowwise_gemm_plugin", "low_latency_gemm_plugin", "bert_context_fmha_fp32_acc")
WARNED_ABOVE_TOKENS = 16384
EAGLE_BATCH, EAGLE_DRAFT = 512, 256
DATA_SUFFIXES = {".json", ".jsonl", ".csv", ".parquet", ".txt", ".arrow"}


@RULES.rule("R1", WARN)
def quantised_kv_cache_loses_paged_context(case: Case) -> str | None:
    kv = case.recipe.kv_cache_precision
    if kv == "auto" or (kv == "fp8" and case.algo in commands.PAGED_WITH_QUANTISED_KV):
        return None
    enabled = case.recipe.reuse_features()
    lost = f", which this recipe enables: {' and '.join(enabled)}" if enabled else ""
    return (
        f"an {kv.upper()} KV cache with {case.algo or 'unquantised'} weights makes the builder switch off "
        f"use_paged_context_fmha with a log line only: no prefix reuse and no chunked context at run time{lost}"
    )


@RULES.rule("R2", INFORM)
def fp8_context_fmha_follows_the_kv_cache(case: Case) -> str | None:
    follows = commands.fp8_context_fmha(case.recipe)
    if case.recipe.precision == "fp8" and not follows:
        return "FP8 weights without an FP8 KV cache and paged context attention: use_fp8_context_fmha is switched off"
    if follows and case.recipe.build.get("use_fp8_context_fmha") == "disable":
        return "an FP8 KV cache with paged context attention forces use_fp8_context_fmha on, whatever [build] says"
    return None


@RULES.rule("R3", WARN)
def fp8_attention_needs_sm_89(case: Case) -> str | None:
    recipe = case.recipe
    if recipe.sm >= 89:
        return None
    if recipe.kv_cache_precision == "fp8":
        return (
            f"SM {recipe.sm} keeps an FP8 KV cache (NVIDIA's quantization hardware matrix lists it for "
            f"{hardware.GENERATIONS[recipe.sm]}) and has no FP8 context attention, so the builder switches off "
            "paged context attention too: no prefix reuse and no chunked context"
        )
    asks = recipe.build.get("use_fp8_context_fmha") == "enable" or recipe.precision.startswith("fp8")
    return f"SM {recipe.sm} has no FP8 context attention, so use_fp8_context_fmha is switched off" if asks else None


def _fails_on_sm_100(case: Case) -> str | None:
    precision, convert = case.recipe.precision, case.recipe.convert
    if precision in ("int4_awq", "int8_wo", "int4_wo"):
        return f"INT8/INT4 weight-only engines, which {precision} is"
    if precision == "int8_sq":
        return "SmoothQuant engines"
    if precision == "fp8_pc_pt" or convert.get("per_channel") or convert.get("per_token"):
        return "per-channel or per-token scaling"
    return "an INT8 KV cache" if case.recipe.kv_cache_precision == "int8" else None


refuse(
    lambda case: case.is_sm100 and _fails_on_sm_100(case),
    "R4: the builder raises RuntimeError on SM {recipe.sm} for {found}; such engines exist up to Hopper only",
)
refuse(
    lambda case: case.is_sm100 and [option for option in NOT_ON_SM100 if case.on(option)],
    "R5: {found} raise NotImplementedError on SM {recipe.sm}",
)
inform(
    lambda case: case.algo not in commands.FUSED_MLP and case.recipe.build.get("use_fused_mlp") != "disable",
    "R6: use_fused_mlp is forced off for {case.algo}: it works unquantised, with FP8 and with MIXED_PRECISION only",
)


refuse(
    lambda case: not commands.fused_mlp(case.recipe) and [option for option in FUSED_SWIGLU if case.on(option)],
    "R7: {found} need use_fused_mlp, which is off for {recipe.precision} weights or by this recipe",
)


@RULES.rule("R8", WARN)
def reduce_fusion_is_for_llama_on_several_gpus(case: Case) -> str | None:
    if not case.on("reduce_fusion") or ((case.is_llama or case.mode == "medusa") and case.recipe.tp > 1):
        return None
    why = "tp is 1" if case.recipe.tp == 1 else f"the model is {case.arch.name}"
    return f"reduce_fusion works for Llama, Gemma2 and Medusa with tp > 1 and is silently off otherwise ({why})"


@RULES.rule("R9", REFUSE)
def user_buffer_needs_reduce_fusion_and_fp8_llama(case: Case) -> str | None:
    if not case.on("user_buffer"):
        return None
    lacks = [] if case.on("reduce_fusion") else ["reduce_fusion is off"]
    lacks += [] if case.is_llama else [f"the model is {case.arch.name}"]
    lacks += [] if case.recipe.precision == "fp8" else [f"precision is {case.recipe.precision}"]
    return f"user_buffer needs reduce_fusion and an FP8 Llama ({', '.join(lacks)})" if lacks else None


refuse(
    lambda case: (
        case.on("norm_quant_fusion")
        and not (case.is_llama and case.recipe.precision == "nvfp4" and not case.on("reduce_fusion"))
    ),
    "R10: norm_quant_fusion is for Llama with NVFP4 and without reduce_fusion only",
)
refuse(
    lambda case: case.recipe.max_seq_len is None,
    "R11: max_seq_len is not set, so the builder would take the model's {case.shape.positions} tokens and size the "
    "KV cache and the profiles for them",
)


@RULES.rule("R12", WARN)
def token_limits_are_changed_silently(case: Case) -> str | None:
    recipe, block, effective = case.recipe, commands.tokens_per_block(case.recipe), commands.max_num_tokens(case.recipe)
    changes = []
    if effective < recipe.max_num_tokens:
        ceiling = f"max_seq_len x max_batch_size = {recipe.max_seq_len} x {recipe.max_batch_size}"
        changes.append(f"max_num_tokens {recipe.max_num_tokens} is lowered to {effective} ({ceiling})")
    if effective > recipe.max_num_tokens:
        need = "" if recipe.chunked_context else ", and chunked_context is then needed at run time"
        changes.append(f"max_num_tokens {recipe.max_num_tokens} is raised to one KV block, {block}{need}")
    if effective > WARNED_ABOVE_TOKENS:
        changes.append(f"max_num_tokens {effective} is above {WARNED_ABOVE_TOKENS}, which the builder warns about")
    opt = recipe.build.get("opt_num_tokens")
    if isinstance(opt, int) and opt > effective:
        changes.append(f"opt_num_tokens {opt} is lowered to {effective}")
    if recipe.build.get("remove_input_padding") == "disable":
        changes.append("with remove_input_padding off, max_num_tokens and opt_num_tokens are ignored")
    return "; ".join(changes) or None


refuse(
    lambda case: case.recipe.build.get("opt_num_tokens") is not None and case.on("multiple_profiles"),
    "R13: opt_num_tokens together with multiple_profiles raises RuntimeError in the builder",
)
refuse(
    lambda case: (
        (case.on("gather_context_logits") or case.on("gather_all_token_logits")) and commands.draft_len(case.recipe)
    ),
    "R14: gather_context_logits with max_draft_len {found} raises RuntimeError in the builder",
)


inform(
    lambda case: (
        commands.draft_len(case.recipe)
        and case.recipe.max_seq_len
        and case.recipe.max_seq_len + commands.draft_len(case.recipe)
    ),
    "R15: {case.mode} adds max_draft_len to max_seq_len: the engine is built for {recipe.max_seq_len} + "
    "{spec.max_draft_len} = {found} tokens",
)
refuse(
    lambda case: (
        case.mode == "eagle"
        and (case.recipe.max_batch_size > EAGLE_BATCH or commands.draft_len(case.recipe) > EAGLE_DRAFT)
    ),
    f"R16: EAGLE takes max_batch_size up to {EAGLE_BATCH} and max_draft_len up to {EAGLE_DRAFT}; "
    "this recipe has {recipe.max_batch_size} and {spec.max_draft_len}",
)
refuse(lambda case: case.on("streamingllm"), "R17: streamingllm is no longer supported: the builder asserts")
inform(
    lambda case: "max_input_len" in case.recipe.build and case.on("remove_input_padding") and case.on("context_fmha"),
    "R18: max_input_len is ignored while remove_input_padding and context_fmha are on; max_seq_len is the limit",
)


@RULES.rule("R19", REFUSE)
def quantize_needs_cuda(case: Case) -> str | None:
    asks = case.quantizes and case.recipe.quantize.get("device") == "cpu"
    if not asks or commands.calibrates_here(case.recipe, case.shape):
        return None
    by_hand = commands.line(commands.checkpoint_on_cpu(case.recipe))
    raises = "quantize.py raises 'GPU is required for inference.' without CUDA, with --device cpu too"
    return f"{raises} (on a CPU: {by_hand})"


inform(
    lambda case: case.quantizes and commands.calibration_size(case.recipe) < case.recipe.texts.size,
    f"R20: AWQ formats calibrate on {AWQ_CALIB_SIZE} texts whatever calibration.size is (here {{recipe.texts.size}})",
)


@RULES.rule("R21", REFUSE)
def calibration_data_must_load(case: Case) -> str | None:
    if not case.quantizes:
        return None
    name = case.recipe.texts.dataset
    field = f"calibration.dataset {name!r}"
    if commands.calibrates_here(case.recipe, case.shape):
        problem = commands.problem_on_cpu(case.recipe)
        return f"{field} is read by build.quantise.quantize only, which {problem}" if problem else None
    folder, column = local_folder(name), "article" if "cnn_dailymail" in name else "text"
    if folder is None:
        reason = f"{field} is neither a local folder nor cnn_dailymail, so quantize.py raises NotImplementedError"
        return None if "cnn_dailymail" in name else reason
    files = [p for p in sorted(folder.rglob("*")) if p.suffix in DATA_SUFFIXES and p.is_file()]
    rest = [p for p in files if not any(split in p.name.lower() for split in ("test", "valid", "dev"))]
    train = [p for p in files if "train" in p.name.lower()] or rest
    if not train:
        must_be = "a folder of json, csv, txt or parquet files with a split 'train'"
        return f"calibration.dataset must be {must_be}, got {name!r}"
    columns = _columns(train[0])
    if columns is None or column in columns:
        return None
    return f"{field} has no column {column!r} ({train[0].name} has {', '.join(sorted(columns)) or 'none'})"


def _columns(path: Path) -> set[str] | None:
    """Column names of a data file, None where only its own library could tell."""
    if path.suffix == ".txt":
        return {"text"}
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        if path.suffix == ".csv":
            try:
                return set(next(csv.reader(file), []))
            except csv.Error:  # a name longer than the csv module reads
                return None
        if path.suffix in (".json", ".jsonl"):
            try:
                first = json.loads(next((line for line in file if line.strip()), "{}"))
            except ValueError:  # one JSON document over several lines
                return None
            return set(first) if isinstance(first, dict) else None
    return None


inform(
    lambda case: case.quantizes and case.recipe.precision in ("int8_wo", "int4_wo"),
    "R22: quantize.py writes unquantised weights and only sets {case.algo}: trtllm-build quantises them on loading",
)


@RULES.rule("R23", INFORM)
def lm_head_stays_unquantised(case: Case) -> str | None:
    requested = case.recipe.quantize.get("quantize_lm_head") is True
    if not case.quantizes or case.algo is None or (requested and case.recipe.precision == "fp8"):
        return None
    also = "; quantize_lm_head is for fp8 only and left out" if requested else ""
    return f"lm_head stays in 16 bits (exclude_modules: lm_head){also}"


refuse(
    lambda case: case.options.get("logits_dtype") != "float32",
    "R24: logits_dtype {case.options[logits_dtype]} does not match the server's TYPE_FP32 outputs, so a request for "
    "logits would fail; ModelOpt writes float16 unless the builder gets float32",
)


warn(
    lambda case: (
        isinstance(workers := case.options["workers"], int) and workers > case.recipe.world_size and str(workers)
    ),
    "R25: workers {found} is more than the {recipe.world_size} ranks there are to build",
)
warn(
    lambda case: (
        (case.recipe.quantize if case.quantizes else case.recipe.convert).get("dtype") == "auto"
        and (case.shape.source_dtype or "of unknown dtype")
    ),
    "R26: dtype auto turns a float32 checkpoint into float16, not bfloat16 (this one is {found}): set bfloat16",
)


@RULES.rule("R27", WARN)
def some_options_are_deprecated(case: Case) -> str | None:
    pages = "paged_kv_cache is deprecated: kv_cache_type paged replaces it"
    logits = "gather_generation_logits is deprecated and prints a harmless warning in every build"
    used = [pages] * ("paged_kv_cache" in case.recipe.build) + [logits] * case.on("gather_generation_logits")
    return "; ".join(used) or None


refuse(
    lambda case: case.recipe.build.get("dry_run") is True,
    "R30: trtllm-build needs a GPU even with --dry_run, because it queries the SM version",
)
inform(
    lambda case: (
        case.quantizes and case.recipe.precision in ("fp8", "nvfp4") and case.recipe.kv_cache_precision == "auto"
    ),
    "R31: kv_cache_precision auto with {recipe.precision}: kv_cache_quant_algo is reset to null in the checkpoint, so "
    "keys and values stay in 16 bits",
)
inform(
    lambda case: "autoq_format" in case.recipe.quantize and "auto_quantize_bits" not in case.recipe.quantize,
    "R32: autoq_format without auto_quantize_bits is clamped to 4 or 8 bits",
)


@RULES.rule("R34", REFUSE)
def qwen_converts_less(case: Case) -> str | None:
    if case.arch.family != "qwen":
        return None
    requested = dict(case.recipe.convert)
    if not case.quantizes:
        requested |= commands.convert_options(case.recipe, case.shape)
    table = option_table.read("convert_checkpoint_qwen")
    for key, value in requested.items():
        if (problem := table.problem(key, value)) is not None:
            return f"Qwen's convert_checkpoint.py cannot do it ({problem}): FP8 and AWQ for Qwen go through quantize.py"
    return None


refuse(
    lambda case: "error" in case.recipe.environment.get("PYTHONWARNINGS", ""),
    "R35: PYTHONWARNINGS=error turns the FutureWarning every 1.2 build step prints into a failure",
)


refuse(
    lambda case: (
        case.quantizes
        and "awq" in case.recipe.precision
        and awq_problem(case.arch, case.recipe.tp, case.recipe.group_size, TRTLLM)
    ),
    "R36: AWQ: {found}, or the export raises NotImplementedError",
)
warn(
    lambda case: (
        case.quantizes
        and "awq" in case.recipe.precision
        and case.arch.vocab_size % 64
        and -(-case.arch.vocab_size // 64) * 64
    ),
    "R37: AWQ pads the vocabulary of {arch.vocab_size} to {found} and writes that as vocab_size: never sample or bias "
    "ids from {arch.vocab_size} on",
)
