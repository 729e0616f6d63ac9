"""Checks beyond the builder's rules: does the card have the format, does the model fit, do the limits make sense.

H: hardware. M: memory. S: shapes and limits. B: what serving needs of the build. Q: what our own quantise stage can
make. C: the CPU engine (C2: every engine). D: speculative decoding, by the TensorRT-LLM 1.x decoder
(``cpp/tensorrt_llm/layers/decodingLayer.cpp``), the README of ``examples/eagle`` and the parameters of the
``tensorrtllm`` backend. U: keys of the recipe that would have no effect.
"""

import os
import re
from pathlib import Path

from build.base import hardware, layout
from build.base.shape import local_folder
from build.model.calibration import CNN_DAILYMAIL, CPYTHON
from build.recipe import commands, memory
from build.recipe.case import Case, RuleBook, Severity
from build.recipe.quantization import HF, TRTLLM, awq_problem, bias_problem, split_problem
from build.recipe.rules import RULES
from build.recipe.schema import CPU, LLMAPI, TRTLLM_VERSION, Calibration

REFUSE, WARN = Severity.REFUSE, Severity.WARN
CHECKS = RuleBook()
refuse, warn = CHECKS.rows(REFUSE), CHECKS.rows(WARN)

# [build] options without which requests cannot join and leave the running batch (in-flight batching).
IN_FLIGHT = {"kv_cache_type": "paged", "remove_input_padding": "enable"}
PAGED_CONTEXT = ("use_paged_context_fmha", "context_fmha")
# NVIDIA's images by month; the recipe's options, and the engines of its pinned version, are those of 26.04 to 26.07.
NVIDIAS_IMAGE = re.compile(r"(?:.*/)?tritonserver:(\d\d\.\d\d)-trtllm-python-py3(?:@.*)?")
PINNED_IMAGES = ("26.04", "26.05", "26.06", "26.07")
CHOICES = re.compile(r"\s*\{\s*\d+(\s*,\s*\d+)*\s*\}(\s*,\s*\{\s*\d+(\s*,\s*\d+)*\s*\})*\s*")
GROUPED = ("int4", "int4_awq", "w4a8_awq")  # precisions with one scale per group of input columns
# Options of networks that a Llama or Qwen decoder does not have.
OTHER_NETWORKS = """
    max_encoder_input_len bert_attention_plugin bert_context_fmha_fp32_acc moe_plugin mamba_conv1d_plugin paged_state
""".split()


def _r4_speaks(case: Case) -> bool:
    """One refusal for one fault: the builder's own rule goes before the support matrix."""
    return case.is_trtllm and RULES["R4"].reason(case) is not None


@CHECKS.rule("H1", REFUSE)
def the_card_has_the_format(case: Case) -> str | None:
    recipe = case.recipe
    if recipe.kind == CPU or recipe.precision in hardware.SUPPORT[recipe.sm] or _r4_speaks(case):
        return None
    where = ", ".join(f"SM {sm}" for sm in hardware.supporting(recipe.precision))
    card = f"SM {recipe.sm} ({hardware.GENERATIONS[recipe.sm]})"
    return f"{recipe.precision} does not run on {card} by TensorRT-LLM's support matrix, only on {where}"


refuse(
    lambda case: (
        case.recipe.kind != CPU
        and case.recipe.kv_cache_precision not in hardware.KV_SUPPORT[case.recipe.sm]
        and not _r4_speaks(case)
    ),
    "H2: an {recipe.kv_cache_precision} KV cache does not run on SM {recipe.sm}",
)
refuse(
    lambda case: (
        case.is_trtllm
        and not (case.recipe.sm == 90 or case.is_sm100)  # R5 speaks of SM 100
        and case.on("gemm_swiglu_plugin")
    ),
    "H3: gemm_swiglu_plugin fp8 exists for Hopper (SM 90) only, not for SM {recipe.sm}",
)
warn(
    lambda case: case.recipe.precision == "w4a8_awq" and case.arch.name == "Qwen3ForCausalLM",
    "H4: W4A8-AWQ is not listed for Qwen3 in TensorRT-LLM's support matrix",
)


@CHECKS.rule("M1", REFUSE)
def one_sequence_must_fit(case: Case) -> str | None:
    recipe, arch = case.recipe, case.arch
    if recipe.max_seq_len is None or ranks_must_divide_the_model(case):
        return None
    need, total = recipe.max_seq_len + commands.draft_len(recipe), memory.footprint(recipe, arch)
    if total.sequences(need) >= 1:
        return None
    if recipe.kind == CPU:
        return f"kv_cache_tokens {recipe.kv_cache_tokens} is less than one sequence of max_seq_len {recipe.max_seq_len}"
    card = hardware.find(str(recipe.gpu))
    fixed = f"{total.fixed_bytes / memory.GIB:.1f} GiB of weights, activations and buffers"
    pool = f"{total.pool_tokens} KV tokens on one {card.name} of {card.memory_gib:g} GiB"
    return f"{fixed} leave space for {pool}, less than one sequence of {need}"


warn(
    lambda case: case.recipe.kind != CPU and (case.recipe.max_seq_len or 0) > case.shape.positions,
    "S1: max_seq_len {recipe.max_seq_len} is more than the {case.shape.positions} tokens the model was made for: text "
    "beyond them is nonsense",
)


@CHECKS.rule("S2", REFUSE)
def ranks_must_divide_the_model(case: Case) -> str | None:
    arch, recipe = case.arch, case.recipe
    format_of_kind = HF if recipe.kind == LLMAPI else TRTLLM
    if (problem := split_problem(arch, recipe.tp, recipe.precision, format_of_kind)) is not None:
        return f"tp {recipe.tp}: {problem}"
    return f"pp {recipe.pp} is more than the model's {arch.num_layers} layers" if recipe.pp > arch.num_layers else None


def _longest_prompt(case: Case) -> int | None:
    """Tokens of a step, where a prompt must fit one and not every prompt does."""
    recipe = case.recipe
    if recipe.max_seq_len is None or (recipe.chunked_context and commands.paged_context_fmha(recipe)):
        return None
    tokens = commands.max_num_tokens(recipe)
    return tokens if tokens < recipe.max_seq_len else None


warn(
    lambda case: case.is_trtllm and _longest_prompt(case),
    "S3: without chunked context a prompt must fit one step, so prompts over max_num_tokens {found} are refused "
    "although max_seq_len is {recipe.max_seq_len}",
)


@CHECKS.rule("S4", REFUSE)
def lookahead_has_limits(case: Case) -> str | None:
    if case.mode != "lookahead_decoding":
        return None
    if case.recipe.max_beam_width > 1:
        return f"lookahead decoding needs max_beam_width 1, not {case.recipe.max_beam_width}"
    alone = case.spec is not None and case.spec.ngram_size == 1
    return "lookahead decoding with ngram_size 1 drafts nothing" if alone else None


refuse(lambda case: case.is_trtllm and bias_problem(case.arch), "S5: {found}")


@CHECKS.rule("B1", REFUSE)
def requests_must_batch_in_flight(case: Case) -> str | None:
    if not case.is_trtllm:
        return None
    given = {key: str(value).lower() for key, value in case.recipe.build.items()}
    wrong = [f"{key} {given[key]}" for key, needed in IN_FLIGHT.items() if given.get(key, needed) != needed]
    wrong += ["gpt_attention_plugin disable"] if given.get("gpt_attention_plugin") == "disable" else []
    wrong += [f"paged_kv_cache {given['paged_kv_cache']}"] if given.get("paged_kv_cache", "enable") != "enable" else []
    needs = "in-flight batching, which the engine is served with, needs a paged KV cache, packed input"
    return f"{' and '.join(wrong)}: {needs} and the attention plugin" if wrong else None


refuse(
    lambda case: case.is_trtllm and commands.tokens_per_block(case.recipe).bit_count() != 1,
    "B2: tokens_per_block {recipe.build[tokens_per_block]} is not a power of two, as the KV cache's must be",
)


@CHECKS.rule("B3", WARN)
def what_the_recipe_asks_for_must_not_be_switched_off(case: Case) -> str | None:
    off = [option for option in PAGED_CONTEXT if case.recipe.build.get(option) == "disable"]
    enabled = case.recipe.reuse_features()
    if not off or not enabled:
        return None
    return f"{' and '.join(off)} disable leaves no {' and no '.join(enabled)}, which this recipe enables"


@CHECKS.rule("B4", REFUSE)
def the_image_must_hold_the_pinned_version(case: Case) -> str | None:
    image = NVIDIAS_IMAGE.fullmatch(case.recipe.image)
    if not case.is_trtllm or image is None or image[1] in PINNED_IMAGES:
        return None
    holds = "is of an older TensorRT-LLM" if image[1] < PINNED_IMAGES[0] else "may have no engine builder any more"
    ours = f"TensorRT-LLM {TRTLLM_VERSION}, which is in those of {PINNED_IMAGES[0]} to {PINNED_IMAGES[-1]}"
    return f"the image of {image[1]} {holds}; options and engines are of {ours}"


refuse(
    lambda case: case.recipe.kind == LLMAPI and commands.problem_on_cpu(case.recipe),  # R21 speaks of engines
    "Q1: the LLM API's checkpoint is made by build.quantise.quantize, which {found}",
)


@CHECKS.rule("Q2", REFUSE)
def its_calibration_texts_must_be_there(case: Case) -> str | None:
    if case.recipe.kind != LLMAPI or case.recipe.precision == "bf16":
        return None
    name = case.recipe.texts.dataset
    if name == CPYTHON or Path(name).name == CNN_DAILYMAIL or os.path.exists(layout.given(name)):
        return None
    return f"calibration.dataset {name!r} is neither a local file or folder nor {CPYTHON} nor {CNN_DAILYMAIL}"


refuse(
    lambda case: (
        case.recipe.kind == LLMAPI  # R36 speaks of engines
        and "awq" in case.recipe.precision
        and awq_problem(case.arch, case.recipe.tp, case.recipe.group_size, HF)
    ),
    "Q3: AWQ: {found}",
)
warn(
    lambda case: commands.unmeasured(case.recipe, case.shape),
    "Q4: verify cannot read the checkpoint of a recipe with {found}, so its quality is not measured: the build needs "
    'ACCEPT_QUALITY="reason", or --accept-quality "reason", which the manifest records',
)
refuse(
    lambda case: case.recipe.kind == CPU and (case.recipe.max_seq_len or 0) > case.arch.max_positions,
    "C1: max_seq_len {recipe.max_seq_len} is more than the {arch.max_positions} positions the CPU engine computes "
    "exactly",
)


@CHECKS.rule("C2", REFUSE)
def a_step_must_hold_a_token_of_each(case: Case) -> str | None:
    recipe = case.recipe
    tokens = commands.max_num_tokens(recipe) if case.is_trtllm else recipe.max_num_tokens
    if tokens >= recipe.max_batch_size * recipe.max_beam_width:
        return None
    running = f"{recipe.max_batch_size} sequences"
    running += f" of {recipe.max_beam_width} beams" if recipe.max_beam_width > 1 else ""
    return f"max_num_tokens {tokens} is less than one token for each of {running}, so they can never run at once"


refuse(
    lambda case: (
        case.recipe.kind == CPU
        and not case.recipe.chunked_context
        and case.recipe.max_num_tokens < (case.recipe.max_seq_len or 0)
    ),
    "C3: without chunked_context a prompt of max_seq_len {recipe.max_seq_len} must fit max_num_tokens",
)
refuse(
    lambda case: (
        case.recipe.kind == CPU
        and case.recipe.calibration is not None
        and case.recipe.precision not in ("int4", "int8_sq")
    ),
    "C4: [calibration] has no effect on {recipe.precision} weights of a CPU engine: int4 and int8_sq are calibrated",
)


@CHECKS.rule("C5", REFUSE)
def a_cpu_engine_must_fit_this_machine(case: Case) -> str | None:
    """The engine process allocates its whole KV pool; the kernel kills a process that outgrows the memory there is."""
    if case.recipe.kind != CPU or case.memory_here is None:
        return None
    foot, gib = memory.footprint(case.recipe, case.arch, case.draft), memory.GIB
    if foot.total_bytes <= case.memory_here:
        return None
    blocks = int((case.memory_here - foot.fixed_bytes) / foot.kv_bytes_per_token) // memory.BLOCK_TOKENS
    fits = f"kv_cache_tokens up to {blocks * memory.BLOCK_TOKENS} fit" if blocks > 0 else "its weights alone do not fit"
    takes = f"weights, activations and {foot.pool_tokens} tokens of KV cache take {foot.total_bytes / gib:.1f} GiB"
    here = f"this machine has {case.memory_here / gib:.1f} GiB (/proc/meminfo and the container's limit)"
    return f"{takes}, and {here}: {fits}"


@CHECKS.rule("U1", REFUSE)
def tables_must_have_an_effect(case: Case) -> str | None:
    unused, program = ("convert", "quantize.py") if case.quantizes else ("quantize", "convert_checkpoint.py")
    if not case.is_trtllm or not getattr(case.recipe, unused):
        return None
    return f"[{unused}] has no effect: {case.recipe.precision} checkpoints of this model are made by {program}"


warn(
    lambda case: (
        commands.put_in_place(case.recipe, case.shape) and layout.relative(layout.checkpoint(case.recipe.name))
    ),
    "U2: the draft heads of {spec.mode} are written by the converter of the image's {spec.mode} example, not by the "
    "command below: put its checkpoint into {found} before the build, which takes it as it is",
)


refuse(
    lambda case: case.spec and case.recipe.max_beam_width > 1 and case.mode != "lookahead_decoding",  # S4 covers that
    "D1: max_beam_width must be 1 with speculative decoding, got {recipe.max_beam_width}: TensorRT-LLM's decodingLayer "
    "throws for mode {spec.mode} with any other beam width",
)


@CHECKS.rule("D3", REFUSE)
def eagle_is_for_llama_on_tensor_parallel_ranks(case: Case) -> str | None:
    if case.mode != "eagle":
        return None
    if not case.is_llama:
        reads = "TensorRT-LLM's EAGLE converter (examples/eagle) reads Llama checkpoints only"
        return f"{reads}; this model is {case.arch.name}"
    if case.recipe.pp > 1:
        return f"pp must be 1 with EAGLE, got {case.recipe.pp}: the README of examples/eagle excludes pipeline ranks"
    return None


warn(
    lambda case: case.mode == "eagle" and case.recipe.precision != "bf16",
    "D4: the README of examples/eagle lists FP16 and BF16 weights for EAGLE, not {recipe.precision}",
)
refuse(
    lambda case: (
        case.mode == "medusa" and case.spec and case.spec.medusa_model and not local_folder(case.spec.medusa_model)
    ),
    "D5: speculative_decoding.medusa_model must be a local folder, got {spec.medusa_model!r}: no stage downloads the "
    "heads, fetch them first",
)
refuse(
    lambda case: case.spec and case.spec.choices is not None and not CHOICES.fullmatch(case.spec.choices),
    "D6: speculative_decoding.choices must be paths in braces as the backend's {spec.mode}_choices parameter wants "
    "them, e.g. '{{0}}, {{0, 0}}, {{1}}', got {spec.choices!r}",
)


def _options_of_other_networks(case: Case) -> str | None:
    recipe = case.recipe
    given = [key for key in OTHER_NETWORKS if key in recipe.build]
    if given:
        return f"{' and '.join(given)} has no effect on {case.arch.name}, a decoder without experts"
    for key, ranks in (("gemm_allreduce_plugin", recipe.tp), ("pp_reduce_scatter", recipe.pp)):
        if recipe.build.get(key, "disable") != "disable" and ranks == 1:
            return f"{key} has no effect on one {'tensor' if key[0] == 'g' else 'pipeline'}-parallel rank"
    asks = recipe.build.get("use_fp8_context_fmha") == "enable"
    if asks and not commands.fp8_context_fmha(recipe) and recipe.precision != "fp8" and recipe.sm >= 89:  # R2, R3
        these = f"{recipe.precision} weights with a {recipe.kv_cache_precision} KV cache"
        needs = "it needs fp8, w4a8_awq or nvfp4 weights and an fp8 KV cache"
        return f"use_fp8_context_fmha has no effect on {these}: {needs}"
    if recipe.build.get("weight_streaming") is True:
        return "weight_streaming has no effect: gpu_weights_percent is not set, so all weights stay on the GPU"
    if recipe.build.get("fuse_fp4_quant") == "enable" and recipe.precision != "nvfp4":
        return f"fuse_fp4_quant has no effect on {recipe.precision} weights: it belongs to nvfp4"
    return None


refuse(
    lambda case: (
        case.recipe.precision not in GROUPED and ("group_size" in case.recipe.given or case.recipe.group_size != 128)
    ),
    "U3: group_size has no effect on {recipe.precision} weights: it belongs to int4, int4_awq and w4a8_awq",
)
refuse(
    lambda case: (
        case.recipe.kind != CPU  # C4 covers the CPU
        and ("calibration" in case.recipe.given or case.recipe.calibration != Calibration())
        and not commands.calibrates(case.recipe, case.shape)
    ),
    "U4: [calibration] has no effect on {recipe.precision} weights with a {recipe.kv_cache_precision} KV cache: "
    "nothing is measured",
)
refuse(
    lambda case: (
        case.is_trtllm
        and case.recipe.optimize_for == "latency"
        and (case.recipe.precision != "fp8" or case.recipe.sm >= 100)
    ),
    'U5: optimize_for = "latency" has no effect on {recipe.precision} weights on SM {recipe.sm}: it chooses the '
    "low-latency FP8 plugins, which exist below SM 100",
)
refuse(
    lambda case: case.recipe.revision is not None and local_folder(case.recipe.model) is not None,
    "U6: revision has no effect on the local folder {recipe.model}: it belongs to a hub model",
)
refuse(lambda case: case.is_trtllm and _options_of_other_networks(case), "U7: {found}")
