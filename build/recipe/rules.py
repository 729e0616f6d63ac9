"""Rules R1 to R37: what TensorRT-LLM 1.2.1 refuses, drops silently or changes silently, checked before a build starts.

Each rule is a function of a Case that returns its reason or None; ``RULES.check(case)`` asks them all. They speak of
kind ``trtllm`` only. Where a rule and the command line meet, ``commands.py`` writes what will really happen.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

from build.base import hardware, layout, option_table
from build.base.option_table import nearest
from build.base.shape import local_folder
from build.recipe import commands
from build.recipe.case import Case, RuleBook, Severity

REFUSE, WARN, INFORM = Severity.REFUSE, Severity.WARN, Severity.INFORM
RULES = RuleBook()

FUSED_SWIGLU = ("gemm_swiglu_plugin", "low_latency_gemm_swiglu_plugin")
NOT_ON_SM100 = (
    "gemm_swiglu_plugin",
    "fp8_rowwise_gemm_plugin",
    "low_latency_gemm_plugin",
    "low_latency_gemm_swiglu_plugin",
    "bert_context_fmha_fp32_acc",
)
WARNED_ABOVE_TOKENS = 16384
EAGLE_BATCH, EAGLE_DRAFT = 512, 256
DATA_SUFFIXES = {".json", ".jsonl", ".csv", ".parquet", ".txt", ".arrow"}


@RULES.rule("R1", WARN)
def quantised_kv_cache_loses_paged_context(case: Case) -> str | None:
    kv = case.recipe.kv_cache_precision
    if kv == "auto" or (kv == "fp8" and case.algo in commands.PAGED_WITH_QUANTISED_KV):
        return None
    features = [("prefix reuse", case.recipe.prefix_reuse), ("chunked context", case.recipe.chunked_context)]
    enabled = [word for word, is_on in features if is_on]
    lost = f", which this recipe enables: {' and '.join(enabled)}" if enabled else ""
    return (
        f"an {kv.upper()} KV cache with {case.algo or 'unquantised'} weights makes the builder switch off "
        f"use_paged_context_fmha with a log line only: no prefix reuse and no chunked context at run time{lost}"
    )


@RULES.rule("R2", INFORM)
def fp8_context_fmha_follows_the_kv_cache(case: Case) -> str | None:
    fp8_kv, paged = case.recipe.kv_cache_precision == "fp8", commands.paged_context_fmha(case.recipe)
    if case.recipe.precision == "fp8" and not (fp8_kv and paged):
        return "FP8 weights without an FP8 KV cache and paged context attention: use_fp8_context_fmha is switched off"
    if fp8_kv and paged and case.recipe.build.get("use_fp8_context_fmha") == "disable":
        return "an FP8 KV cache with paged context attention forces use_fp8_context_fmha on, whatever [build] says"
    return None


@RULES.rule("R3", WARN)
def fp8_attention_needs_sm_89(case: Case) -> str | None:
    if case.recipe.sm >= 89:
        return None
    if case.recipe.kv_cache_precision == "fp8":
        return (
            f"SM {case.recipe.sm} keeps an FP8 KV cache (NVIDIA's quantization hardware matrix lists it for "
            f"{hardware.GENERATIONS[case.recipe.sm]}) and has no FP8 context attention, so the builder switches off "
            "paged context attention too: no prefix reuse and no chunked context"
        )
    asks = case.recipe.build.get("use_fp8_context_fmha") == "enable" or case.recipe.precision.startswith("fp8")
    return (
        f"SM {case.recipe.sm} has no FP8 context attention, so use_fp8_context_fmha is switched off" if asks else None
    )


@RULES.rule("R4", REFUSE)
def integer_weights_fail_on_sm_100(case: Case) -> str | None:
    if not 100 <= case.recipe.sm < 120:
        return None
    precision, kv, convert = case.recipe.precision, case.recipe.kv_cache_precision, case.recipe.convert
    if precision in ("int4_awq", "int8_wo", "int4_wo"):
        what = f"INT8/INT4 weight-only engines, which {precision} is"
    elif precision == "int8_sq":
        what = "SmoothQuant engines"
    elif precision == "fp8_pc_pt" or convert.get("per_channel") or convert.get("per_token"):
        what = "per-channel or per-token scaling"
    elif kv == "int8":
        what = "an INT8 KV cache"
    else:
        return None
    return f"the builder raises RuntimeError on SM {case.recipe.sm} for {what}; such engines exist up to Hopper only"


@RULES.rule("R5", REFUSE)
def some_plugins_are_missing_on_sm_100(case: Case) -> str | None:
    if not 100 <= case.recipe.sm < 120:
        return None
    used = [option for option in NOT_ON_SM100 if case.on(option)]
    return f"{' and '.join(used)} raise NotImplementedError on SM {case.recipe.sm}" if used else None


@RULES.rule("R6", INFORM)
def fused_mlp_needs_plain_or_fp8_weights(case: Case) -> str | None:
    if case.algo in commands.FUSED_MLP or case.recipe.build.get("use_fused_mlp") == "disable":
        return None
    return f"use_fused_mlp is forced off for {case.algo}: it works unquantised, with FP8 and with MIXED_PRECISION only"


@RULES.rule("R7", REFUSE)
def swiglu_plugins_need_the_fused_mlp(case: Case) -> str | None:
    used = [option for option in FUSED_SWIGLU if case.on(option)]
    if not used or commands.fused_mlp(case.recipe):
        return None
    return f"{' and '.join(used)} need use_fused_mlp, which is off for {case.algo or 'this recipe'}"


@RULES.rule("R8", WARN)
def reduce_fusion_is_for_llama_on_several_gpus(case: Case) -> str | None:
    if not case.on("reduce_fusion"):
        return None
    spec = case.recipe.speculative_decoding
    known = case.is_llama or (spec is not None and spec.mode == "medusa")
    if known and case.recipe.tp > 1:
        return None
    why = "tp is 1" if case.recipe.tp == 1 else f"the model is {case.shape.architecture.name}"
    return f"reduce_fusion works for Llama, Gemma2 and Medusa with tp > 1 and is silently off otherwise ({why})"


@RULES.rule("R9", REFUSE)
def user_buffer_needs_reduce_fusion_and_fp8_llama(case: Case) -> str | None:
    if not case.on("user_buffer"):
        return None
    lacks = [
        what
        for what, there in (
            ("reduce_fusion is off", case.on("reduce_fusion")),
            (f"the model is {case.shape.architecture.name}", case.is_llama),
            (f"precision is {case.recipe.precision}", case.recipe.precision == "fp8"),
        )
        if not there
    ]
    return f"user_buffer needs reduce_fusion and an FP8 Llama ({', '.join(lacks)})" if lacks else None


@RULES.rule("R10", REFUSE)
def norm_quant_fusion_is_for_nvfp4_llama(case: Case) -> str | None:
    if not case.on("norm_quant_fusion"):
        return None
    if case.is_llama and case.recipe.precision == "nvfp4" and not case.on("reduce_fusion"):
        return None
    return "norm_quant_fusion is for Llama with NVFP4 and without reduce_fusion only"


@RULES.rule("R11", REFUSE)
def max_seq_len_must_be_set(case: Case) -> str | None:
    if case.recipe.max_seq_len is not None:
        return None
    return (
        f"max_seq_len is not set, so the builder would take the model's {case.shape.positions} tokens and size the "
        "KV cache and the profiles for them"
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


@RULES.rule("R13", REFUSE)
def opt_num_tokens_excludes_multiple_profiles(case: Case) -> str | None:
    if case.recipe.build.get("opt_num_tokens") is None or not case.on("multiple_profiles"):
        return None
    return "opt_num_tokens together with multiple_profiles raises RuntimeError in the builder"


@RULES.rule("R14", REFUSE)
def context_logits_exclude_drafting(case: Case) -> str | None:
    gathers = case.on("gather_context_logits") or case.on("gather_all_token_logits")
    if not gathers or commands.draft_len(case.recipe) == 0:
        return None
    return (
        f"gather_context_logits with max_draft_len {commands.draft_len(case.recipe)} raises RuntimeError in the builder"
    )


@RULES.rule("R15", INFORM)
def drafting_lengthens_sequences(case: Case) -> str | None:
    spec, length = case.recipe.speculative_decoding, case.recipe.max_seq_len
    if spec is None or spec.max_draft_len == 0 or length is None:
        return None
    total = f"{length} + {spec.max_draft_len} = {length + spec.max_draft_len}"
    return f"{spec.mode} adds max_draft_len to max_seq_len: the engine is built for {total} tokens"


@RULES.rule("R16", REFUSE)
def eagle_has_limits(case: Case) -> str | None:
    spec, batch = case.recipe.speculative_decoding, case.recipe.max_batch_size
    if spec is None or spec.mode != "eagle" or (batch <= EAGLE_BATCH and spec.max_draft_len <= EAGLE_DRAFT):
        return None
    return (
        f"EAGLE takes max_batch_size up to {EAGLE_BATCH} and max_draft_len up to {EAGLE_DRAFT}; "
        f"this recipe has {batch} and {spec.max_draft_len}"
    )


@RULES.rule("R17", REFUSE)
def streamingllm_is_gone(case: Case) -> str | None:
    return "streamingllm is no longer supported: the builder asserts" if case.on("streamingllm") else None


@RULES.rule("R18", INFORM)
def max_input_len_is_ignored(case: Case) -> str | None:
    if "max_input_len" not in case.recipe.build or not (case.on("remove_input_padding") and case.on("context_fmha")):
        return None
    return "max_input_len is ignored while remove_input_padding and context_fmha are on; max_seq_len is the limit"


@RULES.rule("R19", REFUSE)
def quantize_needs_cuda(case: Case) -> str | None:
    if not case.quantizes or commands.calibrates_here(case.recipe, case.shape):
        return None
    if case.recipe.quantize.get("device") != "cpu" and case.gpus_here != 0:
        return None
    by_hand = commands.line(commands.checkpoint_on_cpu(case.recipe))
    return (
        f"quantize.py raises 'GPU is required for inference.' without CUDA, with --device cpu too (on a CPU: {by_hand})"
    )


@RULES.rule("R20", INFORM)
def awq_calibrates_on_32_texts(case: Case) -> str | None:
    used, requested = commands.calibration_size(case.recipe), case.recipe.texts.size
    if not case.quantizes or used == requested:
        return None
    return f"AWQ formats calibrate on {used} texts whatever calibration.size is (here {requested})"


@RULES.rule("R21", REFUSE)
def calibration_data_must_load(case: Case) -> str | None:
    if not case.quantizes:
        return None
    name = case.recipe.texts.dataset
    if commands.calibrates_here(case.recipe, case.shape):
        problem = commands.problem_on_cpu(case.recipe)
        return (
            f"calibration.dataset {name!r} is read by build.quantise.quantize only, which {problem}"
            if problem
            else None
        )
    folder, column = local_folder(name), "article" if "cnn_dailymail" in name else "text"
    if folder is None:
        if "cnn_dailymail" in name:
            return None
        return (
            f"calibration.dataset {name!r} is neither a local folder nor cnn_dailymail, "
            "so quantize.py raises NotImplementedError"
        )
    files = [p for p in sorted(folder.rglob("*")) if p.suffix in DATA_SUFFIXES and p.is_file()]
    train = [p for p in files if "train" in p.name.lower()] or [
        p for p in files if not any(split in p.name.lower() for split in ("test", "valid", "dev"))
    ]
    if not train:
        return (
            "calibration.dataset must be a folder of json, csv, txt or parquet files with a split 'train', "
            f"got {name!r}"
        )
    columns = _columns(train[0])
    if columns is None or column in columns:
        return None
    there = ", ".join(sorted(columns)) or "none"
    return f"calibration.dataset {name!r} has no column {column!r} ({train[0].name} has {there})"


def _columns(path: Path) -> set[str] | None:
    """Column names of a data file, None where only its own library could tell."""
    with path.open(encoding="utf-8", errors="replace") as file:
        if path.suffix == ".txt":
            return {"text"}
        if path.suffix == ".csv":
            return set(next(csv.reader(file), []))
        if path.suffix in (".json", ".jsonl"):
            try:
                first = json.loads(next((row for row in file if row.strip()), "{}"))
            except ValueError:  # one JSON document over several lines
                return None
            return set(first) if isinstance(first, dict) else None
    return None


@RULES.rule("R22", INFORM)
def weight_only_formats_are_quantised_later(case: Case) -> str | None:
    if not case.quantizes or case.recipe.precision not in ("int8_wo", "int4_wo"):
        return None
    return f"quantize.py writes unquantised weights and only sets {case.algo}: trtllm-build quantises them on loading"


@RULES.rule("R23", INFORM)
def lm_head_stays_unquantised(case: Case) -> str | None:
    if not case.quantizes or case.algo is None:
        return None
    requested = case.recipe.quantize.get("quantize_lm_head") is True
    if requested and case.recipe.precision == "fp8":
        return None
    also = "; quantize_lm_head is for fp8 only and left out" if requested else ""
    return f"lm_head stays in 16 bits (exclude_modules: lm_head){also}"


@RULES.rule("R24", REFUSE)
def logits_must_be_float32(case: Case) -> str | None:
    dtype = case.options.get("logits_dtype")
    if dtype == "float32":
        return None
    return (
        f"logits_dtype {dtype} does not match the server's TYPE_FP32 outputs, so a request for logits would fail; "
        "ModelOpt writes float16 unless the builder gets float32"
    )


@RULES.rule("R25", WARN)
def workers_are_cut_to_the_gpus(case: Case) -> str | None:
    workers, gpus = case.options.get("workers", 1), case.gpus_here
    if not isinstance(workers, int) or workers < 1:
        return None  # O5 refuses it
    if gpus is not None and gpus < workers:
        after = "and its process pool then raises" if gpus == 0 else "so ranks are built one after another"
        return f"the builder cuts workers {workers} to the {gpus} GPUs of this machine, {after}"
    ranks = case.recipe.world_size
    return f"workers {workers} is more than the {ranks} ranks there are to build" if workers > ranks else None


@RULES.rule("R26", WARN)
def dtype_auto_makes_float16(case: Case) -> str | None:
    given = case.recipe.quantize if case.quantizes else case.recipe.convert
    if given.get("dtype") != "auto":
        return None
    source = case.shape.source_dtype or "of unknown dtype"
    return f"dtype auto turns a float32 checkpoint into float16, not bfloat16 (this one is {source}): set bfloat16"


@RULES.rule("R27", WARN)
def some_options_are_deprecated(case: Case) -> str | None:
    changes = []
    if "paged_kv_cache" in case.recipe.build:
        changes.append("paged_kv_cache is deprecated: kv_cache_type paged replaces it")
    if case.on("gather_generation_logits"):
        changes.append("gather_generation_logits is deprecated and prints a harmless warning in every build")
    return "; ".join(changes) or None


@RULES.rule("R28", REFUSE)
def misspelt_options_vanish(case: Case) -> str | None:
    table = option_table.read("trtllm_build")
    for key in case.recipe.build:
        if key not in table.options and key not in ("tp_size", "pp_size"):
            near = table.nearest(key)
            return f"trtllm-build has no option {key!r} (nearest {near!r}), and a BuildConfig drops it silently"
    file = case.recipe.build.get("build_config")
    return _misspelt_plugin(str(file)) if file is not None else None


def _misspelt_plugin(file: str) -> str | None:
    known = json.loads((layout.OPTION_TABLES / "llmapi_equivalents.json").read_text(encoding="utf-8"))
    plugins = (*known["PluginConfig_cli_fields"], *known["PluginConfig_non_cli_fields"])
    try:
        given = json.loads((layout.ROOT / file).read_text(encoding="utf-8")).get("plugin_config", {})
    except (OSError, ValueError, AttributeError) as exc:
        return f"build_config {file!r} cannot be checked ({exc}), and PluginConfig drops misspelt keys silently"
    wrong = [key for key in given if key not in plugins]
    if not wrong:
        return None
    return (
        f"build_config {file!r} has plugin key {wrong[0]!r} (nearest is {nearest(wrong[0], plugins)!r}), which "
        "PluginConfig drops silently: pass it on the command line"
    )


@RULES.rule("R29", REFUSE)
def switches_take_a_value(case: Case) -> str | None:
    options = option_table.read("trtllm_build").options
    for key, value in case.recipe.build.items():
        if key in options and options[key].type != "flag" and isinstance(value, bool):
            return f"--{key} takes a value (enable or disable); a bare --{key} is an argument error"
    return None


@RULES.rule("R30", REFUSE)
def the_builder_needs_a_gpu(case: Case) -> str | None:
    if case.recipe.build.get("dry_run") is not True and case.gpus_here != 0:
        return None
    return "trtllm-build needs a GPU even with --dry_run, because it queries the SM version"


@RULES.rule("R31", INFORM)
def fp8_alone_leaves_the_kv_cache(case: Case) -> str | None:
    if not case.quantizes or case.recipe.precision not in ("fp8", "nvfp4") or case.recipe.kv_cache_precision != "auto":
        return None
    return (
        f"kv_cache_precision auto with {case.recipe.precision}: kv_cache_quant_algo is reset to null in the "
        "checkpoint, so keys and values stay in 16 bits"
    )


@RULES.rule("R32", INFORM)
def autoq_needs_its_bits(case: Case) -> str | None:
    given = case.recipe.quantize
    if "autoq_format" not in given or "auto_quantize_bits" in given:
        return None
    return "autoq_format without auto_quantize_bits is clamped to 4 or 8 bits"


@RULES.rule("R33", REFUSE)
def parallelism_is_chosen_with_the_checkpoint(case: Case) -> str | None:
    given = [key for key in ("tp_size", "pp_size") if key in case.recipe.build]
    if given:
        return f"trtllm-build has no {' or '.join(given)}: tp and pp are chosen when the checkpoint is made"
    ranks, recipe = case.rank_files, case.recipe
    if ranks is None or ranks == recipe.world_size:
        return None
    return f"the checkpoint has {ranks} rank files and tp x pp is {recipe.tp} x {recipe.pp}: make the checkpoint again"


@RULES.rule("R34", REFUSE)
def qwen_converts_less(case: Case) -> str | None:
    if case.shape.family != "qwen":
        return None
    requested = dict(case.recipe.convert)
    if not case.quantizes:
        requested |= commands.convert_options(case.recipe, case.shape)
    table = option_table.read("convert_checkpoint_qwen")
    for key, value in requested.items():
        if (problem := table.problem(key, value)) is not None:
            return f"Qwen's convert_checkpoint.py cannot do it ({problem}): FP8 and AWQ for Qwen go through quantize.py"
    return None


@RULES.rule("R35", REFUSE)
def warnings_must_not_be_errors(case: Case) -> str | None:
    if "error" not in case.recipe.environment.get("PYTHONWARNINGS", ""):
        return None
    return "PYTHONWARNINGS=error turns the FutureWarning every 1.2 build step prints into a failure"


@RULES.rule("R36", REFUSE)
def awq_blocks_must_divide_each_shard(case: Case) -> str | None:
    if not case.quantizes or "awq" not in case.recipe.precision:
        return None
    arch, block = case.shape.architecture, case.recipe.group_size
    inputs = {
        "attention.dense": arch.num_heads * arch.head_dim,
        "mlp.proj": arch.intermediate_size,
        "attention.qkv and mlp.fc": arch.hidden_size,  # whole on every rank, and yet the exporter divides them
    }
    ranks = case.recipe.tp
    for name, columns in inputs.items():
        if columns % ranks or columns // ranks % block:
            return (
                f"AWQ needs the inputs of {name} on one rank ({columns} / {ranks}) to be a multiple of group_size "
                f"{block}, or the export raises NotImplementedError"
            )
    return None


@RULES.rule("R37", WARN)
def awq_pads_the_vocabulary(case: Case) -> str | None:
    vocab = case.shape.architecture.vocab_size
    if not case.quantizes or "awq" not in case.recipe.precision or vocab % 64 == 0:
        return None
    padded = -(-vocab // 64) * 64
    return (
        f"AWQ pads the vocabulary of {vocab} to {padded} and writes that as vocab_size: never sample or bias ids "
        f"from {vocab} on"
    )
