"""Package: what Triton and the server need of an engine: its configurations, tokenizer files and manifest.

``engine/configs/<engine>.pbtxt`` is written for the recipe; a compiled engine sends bare ids, so ``ensemble``,
``detokenizer`` and their packed forms get the variants of ``build/trtllm/`` under the same name. An engine of kind
llmapi speaks in band like the CPU engine, and its configuration is the CPU engine's with another program.

Tensors are those of ``contract.tensors`` that the C++ backend has; how it wants them (reshaped scalars, ragged rows)
comes from ``build/trtllm/triton_contract_1.x.json``. The text is parsed by Triton's own protobuf before it is written.
"""

import dataclasses
import json
import re
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from build.base import digest, layout
from build.base import shape as shapes
from build.base.checkpoint import TOKENIZER_FILES, Checkpoint
from build.base.shape import Shape
from build.package import gpu_adapters
from build.package.compile_trtllm import check_engine
from build.quality import evaluation
from build.recipe import commands, provenance
from build.recipe.recipe import Recipe
from build.recipe.schema import CPU, LLMAPI, TRTLLM, TRTLLM_VERSION
from contract import tensors
from contract.errors import EngineFailed, InvalidArgument
from contract.manifest import FILE_NAME
from contract.tensors import Tensor
from python_backends.grammar import vocabulary
from python_backends.grammar.checker import TOKENIZER_INFO

# Their variants around an engine that sends bare ids; the ensembles first.
BARE_ENGINE_STEPS = ("ensemble", "ensemble_packed", "detokenizer", "detokenizer_packed")
SOURCES = ("package/model_configs.py", "package/compile_trtllm.py", "recipe/commands.py", "quantise/quantize.py")
LEAST_IN_FLIGHT, IN_FLIGHT_PER_SEQUENCE = 64, 4
CONTRACT = layout.OPTION_TABLES / "triton_contract_1.x.json"
LOGITS_TYPE = "TYPE_FP32"  # what the engine is built with: --logits_dtype float32 (R24)
LOGITS_OUTPUT = {"context_logits": "gather_context_logits", "generation_logits": "gather_generation_logits"}
DRAFT_OUTPUTS = ("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens")
DECODING_MODE = {"lookahead_decoding": "lookahead", "medusa": "medusa", "eagle": "eagle"}
DECODING_MODE |= {"explicit_draft_tokens": "redrafter"}


@lru_cache
def contract() -> dict[str, dict]:
    """The tensors of the C++ backend: ``input`` and ``output``, each by name."""
    table = json.loads(CONTRACT.read_text(encoding="utf-8"))["tensorrt_llm"]
    return {side: {tensor["name"]: tensor for tensor in table[f"{side}s"]} for side in ("input", "output")}


def inputs() -> list[str]:
    """Input tensors of the engine's configuration, in the contract's order, and the weights of adapters."""
    return [t.name for t in tensors.ENGINE_INPUTS if not t.ours] + ["lora_weights", "lora_config"]


def outputs(recipe: Recipe) -> list[str]:
    """Output tensors: the contract's, logits where the engine gathers them, draft statistics where it drafts."""
    names = [t.name for t in tensors.ENGINE_OUTPUTS if not t.ours]
    gathers_all = recipe.build.get("gather_all_token_logits") is True
    names += [name for name, option in LOGITS_OUTPUT.items() if gathers_all or recipe.build.get(option) is True]
    return names + (list(DRAFT_OUTPUTS) if recipe.speculative_decoding is not None else [])


def parameters(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """(key, value, why) of every parameter we set; the rest is the backend's default."""
    paged, word = commands.paged_context_fmha(recipe), {True: "true", False: "false"}
    yield "gpt_model_type", "inflight_fused_batching", "Requests join and leave the running batch at every step."
    path = str(layout.relative(layout.compiled(recipe.name)))
    yield "gpt_model_path", path, "From the folder tritonserver is started in, which is the repository root."
    policy, why = "guaranteed_no_evict", "A request is scheduled once its KV cache is certain: none is paused half-way."
    if recipe.optimize_for == "throughput":
        policy = "max_utilization"
        why = "The batch is filled before KV is certain; a sequence may be paused and redone."
    yield "batch_scheduler_policy", policy, why
    share = "Of the memory left once the engine is loaded"
    bound = ", at most the tokens below." if recipe.kv_cache_tokens else "."
    yield "kv_cache_free_gpu_mem_fraction", f"{recipe.kv_cache_fraction:g}", share + bound
    if recipe.kv_cache_tokens:
        yield "max_tokens_in_paged_kv_cache", str(recipe.kv_cache_tokens), "The recipe's kv_cache_tokens."
    lost = "" if paged else " The engine has no paged context attention, which both need (R1, R3)."
    yield "enable_kv_cache_reuse", word[recipe.prefix_reuse and paged], "Prompts that begin alike share blocks." + lost
    why = "A long prompt is prefilled in pieces between the steps of the others."
    yield "enable_chunked_context", word[recipe.chunked_context and paged], why
    yield "max_beam_width", str(recipe.max_beam_width), "As built."
    why = "The default would repeat the prompt in front of a non-streamed answer."
    yield "exclude_input_in_output", "true", why
    why = "Soon after a stop request the slot and its KV blocks are free; the default is 100."
    yield "cancellation_check_period_ms", "10", why
    yield from _drafting(recipe)
    folder, guided = layout.relative(layout.ENGINES / recipe.name), follows_grammars(recipe)
    if recipe.adapters:
        yield from _adapter_cache(recipe)
    why = "Guides: each is compiled by the tokenizer's checker first (docs/structured-output.md)."
    lost = "These three must be there; empty, because guides go with neither drafts nor beams."
    yield "tokenizer_dir", str(folder) if guided else "", why if guided else lost
    yield "guided_decoding_backend", "xgrammar" if guided else "", ""
    yield "xgrammar_tokenizer_info_path", str(folder / TOKENIZER_INFO) if guided else "", ""


def follows_grammars(recipe: Recipe) -> bool:
    """Whether requests of the engine may have guides: the backend masks one token of one beam a step."""
    return recipe.kind == LLMAPI or (recipe.speculative_decoding is None and recipe.max_beam_width == 1)


def _drafting(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    spec = recipe.speculative_decoding
    if spec is None or spec.mode not in DECODING_MODE:
        return
    yield "decoding_mode", DECODING_MODE[spec.mode], f"Drafts up to {spec.max_draft_len} tokens a step, as built."
    if spec.mode == "lookahead_decoding":
        why = "Lookahead throws at load unless all three are set."
        yield "lookahead_window_size", str(spec.window_size), why
        yield "lookahead_ngram_size", str(spec.ngram_size), ""
        yield "lookahead_verification_set_size", str(spec.verification_set_size), ""
    if spec.choices is not None:
        yield f"{spec.mode}_choices", spec.choices, "The tree of drafts the heads propose."


def _adapter_cache(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """The backend counts in pages, one for an adapter of the widest rank."""
    modules, rank = commands.lora_modules(recipe)
    yield "lora_cache_optimal_adapter_size", str(rank), "A page of the adapters' caches holds one of the widest rank."
    yield "lora_cache_max_adapter_size", str(rank), ""
    arch = shapes.find(recipe.model, revision=recipe.revision).architecture
    held = recipe.adapter_cache or len(recipe.adapters)
    # A page has as many slots for a matrix as the narrowest one's rows fit into it: less than twice its own size.
    width = 2 * (arch.hidden_size + max(arch.intermediate_size, arch.num_heads * arch.head_dim))
    size = 2 * held * rank * arch.num_layers * len(modules) * width
    yield "lora_cache_host_memory_bytes", str(size), f"Room for {held} adapters, in every rank."


def render(recipe: Recipe) -> str:
    """The engine's whole configuration file. Raises InvalidArgument for a CPU recipe, which needs none."""
    if recipe.kind == CPU:
        raise InvalidArgument("engine", f"{recipe.name} is of kind {recipe.kind!r}; engine/config.pbtxt is its own")
    if recipe.kind == LLMAPI:
        return _render_llmapi(recipe)
    head = textwrap.dedent(f"""\
        # Token ids -> token ids on {recipe.gpu} (SM {recipe.sm}), by the TensorRT-LLM engine {recipe.name}.
        # Written by build/package/model_configs.py from the recipe of that name; chosen by --model-config-name.
        name: "engine"
        backend: "tensorrtllm"
        # The engine's own limit: the backend takes it from the engine, Triton's batcher from here.
        max_batch_size: {recipe.max_batch_size}
        """)
    parts = [head, _tensor_list("input", inputs()), _tensor_list("output", outputs(recipe)), _scheduling(recipe)]
    lines = []
    for key, value, why in parameters(recipe):
        lines += textwrap.wrap(f"# {why}", 118, subsequent_indent="# ") if why else []
        quoted = json.dumps(value, ensure_ascii=False)
        lines.append(f'parameters {{ key: "{key}" value {{ string_value: {quoted} }} }}')
    return _in_type_of(recipe, "\n".join([*parts, "\n".join(lines)]) + "\n")


def _in_type_of(recipe: Recipe, config: str) -> str:
    """The configuration with lora_weights in the model's type, else the backend refuses them."""
    half = commands.dtype(recipe, shapes.find(recipe.model, revision=recipe.revision)) == "float16"
    return re.sub(r'(name: "lora_weights" data_type: TYPE_)\w+', rf"\g<1>{'FP16' if half else 'BF16'}", config)


def _scheduling(recipe: Recipe) -> str:
    return textwrap.dedent(f"""\
        # Streams: one request, many responses.
        model_transaction_policy {{ decoupled: true }}
        # The executor batches in flight, so Triton's batcher hands requests over at once. Its bound is also the
        # executor's: one full batch may wait, more is refused at once and the gateway tries elsewhere.
        dynamic_batching {{
          preferred_batch_size: [ {recipe.max_batch_size} ]
          max_queue_delay_microseconds: 0
          default_queue_policy {{ max_queue_size: {recipe.max_batch_size} }}
        }}
        # One executor; it places itself on the GPUs, {recipe.world_size} of them.
        instance_group [ {{ kind: KIND_CPU count: 1 }} ]
        """)


def _tensor_list(side: str, names: list[str]) -> str:
    ours = {tensor.name: tensor for tensor in (*tensors.ENGINE_INPUTS, *tensors.ENGINE_OUTPUTS)}
    rows = [_tensor(contract()[side][name], ours.get(name)) for name in names]
    ends = [","] * (len(rows) - 1) + [" "]
    body = [f"  {row}{end}  # {note}" for (row, note), end in zip(rows, ends, strict=True)]
    return "\n".join([f"{side} [", *body, "]", ""])


def _tensor(theirs: dict, ours: Tensor | None) -> tuple[str, str]:
    """The tensor's entry, and its shape on the wire for the comment."""
    datatype = LOGITS_TYPE if theirs["data_type"] == "${logits_datatype}" else theirs["data_type"]
    if ours is not None:
        expected = f"TYPE_{ours.datatype.replace('BYTES', 'STRING')}"
        same = datatype == expected and tuple(theirs["dims"]) == ours.dims
        assert same, f"{ours.name}: contract/tensors.py and the backend's contract differ"
    dims = ", ".join(map(str, theirs["dims"]))
    entry = f'name: "{theirs["name"]}" data_type: {datatype} dims: [ {dims} ]'
    entry += " reshape: { shape: [ ] }" if theirs["reshape_scalar"] else ""
    entry += " optional: true" if theirs["optional"] else ""
    entry += " allow_ragged_batch: true" if theirs["allow_ragged_batch"] else ""
    wire = ", ".join(["batch", *("n" if d == -1 else str(d) for d in theirs["dims"])])
    return f"{{ {entry} }}", f"[{wire}]"


def _render_llmapi(recipe: Recipe) -> str:
    """The CPU engine's configuration, so the same tensors, with another program behind it."""
    text = (layout.MODEL_REPOSITORY / "engine" / "config.pbtxt").read_text(encoding="utf-8")
    body = text[text.index("name: ") :]
    program = 'backend: "python"\ndefault_model_filename: "llmapi.py"'
    assert body.count('backend: "python"') == 1
    head = textwrap.dedent(f"""\
        # Token ids -> token ids on {recipe.gpu} (SM {recipe.sm}), by TensorRT-LLM's LLM API: {recipe.name}.
        # Written by build/package/model_configs.py from the recipe of that name; chosen by --model-config-name.
        """)
    return head + body.replace('backend: "python"', program)


def package(recipe: Recipe, shape: Shape, model: Checkpoint) -> list[Path]:
    """Writes configurations, tokenizer files and, last, the manifest; the files in the engine's folder.

    Raises EngineFailed where what is packaged is missing, not the recipe's, or was not verified.
    """
    folder = layout.ENGINES / recipe.name
    write(recipe, layout.MODEL_REPOSITORY)
    if recipe.kind == TRTLLM:
        write_steps(recipe, layout.MODEL_REPOSITORY)
    model.copy_side_files(folder)
    built = layout.compiled(recipe.name) if recipe.kind == TRTLLM else layout.checkpoint(recipe.name)
    if follows_grammars(recipe):
        sizes = model.architecture.vocab_size, model.eos_token_ids
        info = vocabulary.tokenizer_info(folder / "tokenizer.json", *sizes, marked=recipe.kind == TRTLLM)
        layout.write_whole(folder / TOKENIZER_INFO, json.dumps(info))
    beside = ("config.json", "generation_config.json", *TOKENIZER_FILES, TOKENIZER_INFO)
    files = [path for name in beside if (path := folder / name).is_file()]
    files += gpu_adapters.package(recipe, model, folder, commands.dtype(recipe, shape))
    served = [*files, *(path for path in sorted(built.rglob("*")) if path.is_file())]
    manifest = dataclasses.replace(
        provenance.manifest(recipe, model, _versions(recipe)),
        created=provenance.now(),
        max_num_tokens=commands.max_num_tokens(recipe),
        properties={"lora_target_modules": " ".join(commands.lora_modules(recipe)[0])} if recipe.adapters else {},
        files={str(path.relative_to(folder)): digest.sha256_file(path) for path in served},
        evaluation=evaluation.accepted(recipe),
    )
    manifest.save(folder)
    return [*files, folder / FILE_NAME]


def _versions(recipe: Recipe) -> dict[str, str]:
    """Of everything that shaped the files: this project, what quantised, what compiled and where."""
    versions = provenance.versions(SOURCES)
    report = _json(layout.checkpoint(recipe.name) / "quantization_report.json")
    versions |= {str(name): str(version) for name, version in dict(report.get("versions", {})).items()}
    machine = _json(layout.built_on(recipe.name)) if recipe.kind == TRTLLM else {}
    versions |= {name: machine[name] for name in ("driver", "tensorrt", "cuda") if machine.get(name)}
    return versions | {"tensorrt_llm": machine.get("tensorrt_llm") or TRTLLM_VERSION}


def _json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # NVIDIA's own quantize.py leaves no report
    return value if isinstance(value, dict) else {}


def write(recipe: Recipe, repository: Path) -> Path:
    """Writes the engine's configuration, whole or not at all; the path of the file.

    Raises EngineFailed when the compiled engine is missing or not the recipe's, or the quality gate refused it.
    """
    if recipe.kind == TRTLLM:
        check_engine(recipe)
    evaluation.accepted(recipe)
    return _write_config(repository, "engine", recipe.name, render(recipe))


def write_steps(recipe: Recipe, repository: Path) -> list[Path]:
    """Writes the variants of the other steps around a compiled engine, under the engine's name."""
    texts = {step: (layout.OPTION_TABLES / f"{step}.pbtxt").read_text(encoding="utf-8") for step in BARE_ENGINE_STEPS}
    texts |= {step: with_inflight_limit(texts[step], recipe.max_batch_size) for step in BARE_ENGINE_STEPS[:2]}
    shipped = layout.MODEL_REPOSITORY / "tokenizer" / "config.pbtxt"
    texts["tokenizer"] = _in_type_of(recipe, shipped.read_text(encoding="utf-8"))
    return [_write_config(repository, step, recipe.name, text) for step, text in texts.items()]


def with_inflight_limit(ensemble: str, max_batch_size: int) -> str:
    """The ensemble's configuration with max_inflight_requests set for an engine of that batch size.

    All requests share the limit, counted at every step: not lower than what the engine may hold, one batch running and
    one waiting (its queue). Twice that leaves the detokenizer two responses for each.
    """
    limit = max(LEAST_IN_FLIGHT, IN_FLIGHT_PER_SEQUENCE * max_batch_size)
    changed, count = re.subn(r"(?m)^( *max_inflight_requests: )\d+$", rf"\g<1>{limit}", ensemble)
    assert count == 1, "build/trtllm/ensemble.pbtxt must set max_inflight_requests once"
    return changed


def _write_config(repository: Path, model: str, engine: str, text: str) -> Path:
    parse(text)
    path = repository / model / "configs" / f"{engine}.pbtxt"
    layout.write_whole(path, text)
    return path


def parse(text: str) -> object:
    """``text`` as Triton's ModelConfig; EngineFailed if it is not one."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    try:
        return text_format.Parse(text, model_config_pb2.ModelConfig())
    except text_format.ParseError as exc:
        raise EngineFailed(f"the configuration does not parse as a ModelConfig: {exc}") from exc
