"""A checkpoint and a recipe become the folder that the CPU engine loads.

    openvino_model.xml/.bin    the graph of ``graph.py`` with weights as ``weights.py`` stores them
    openvino_detokenizer.xml/.bin   what each id spells, for grammars (detokenizer.py)
    grammar_checker/           a model without weights in which grammars are compiled first
    config.json                the checkpoint's own
    generation_config.json     the checkpoint's, its end ids always a list under eos_token_id
    tokenizer.json, tokenizer_config.json, special_tokens_map.json, added_tokens.json, chat_template.*   as they are

Neither torch nor nncf is needed, then or later.
"""

import math
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import openvino as ov

from build.base.architecture import Architecture
from build.base.checkpoint import Checkpoint
from build.base.json_fields import CheckpointError
from build.base.program import Notify
from build.model import detokenizer, exported_graph, gptq, graph, lora_adapter, lora_graph, openvino_engine, smoothquant
from build.model.calibration import read_blocks
from build.model.lora_graph import LoraGraph
from build.model.openvino_engine import EXACT, OpenVinoEngine
from build.model.weights import Weights
from build.package import side_files
from build.quality.comparison import log_softmax
from build.recipe.recipe import Recipe
from build.recipe.schema import CpuCalibration
from contract.errors import InvalidArgument
from contract.scheduling import BLOCK_TOKENS

# What an exported graph is asked before it is served: longer than one piece of a prompt.
SERVED_PROMPT, SERVED_TOKENS = 300, 8
SERVED_DIFFERENCE = 0.05  # nats between two f32 runs of one graph: 0.0001 was measured, 2 and more without a part of it


def compile_cpu(checkpoint: Checkpoint, recipe: Recipe, folder: Path, notify: Notify) -> None:
    """Fills ``folder``, which exists and is empty. Raises CheckpointError or InvalidArgument with one sentence."""
    check(checkpoint, recipe)
    arch = checkpoint.architecture
    notify(f"{arch.name}, {arch.num_parameters() / 1e6:,.1f} M parameters: weights to {recipe.precision}")
    calibrated, rounded = {}, None
    if recipe.precision == "int8_sq":
        blocks = _calibration_blocks(checkpoint, recipe, notify)
        smoothed = smoothquant.Smoothed(checkpoint, blocks, recipe.head_precision == "int8", notify)
        notify(f"{len(smoothed.ranges)} of {smoothed.inputs} inputs in 8 bits; the others lose too much in them")
        checkpoint, rounded = smoothed.checkpoint, smoothquant.Rounded(smoothed.ranges)
        arch = checkpoint.architecture
    elif recipe.calibration is not None:
        blocks = _calibration_blocks(checkpoint, recipe, notify)
        calibrated = gptq.calibrated(checkpoint, blocks, recipe.group_size, notify)
    opened = [lora_adapter.open_adapter(entry.name, entry.path, checkpoint) for entry in recipe.adapters]
    stored = checkpoint
    if opened:
        notify(f"LoRA adapters {', '.join(f'{a.record.name} (rank {a.record.rank})' for a in opened)}")
        stored = lora_graph.widened(checkpoint, len(opened), adapter_first_token_id(checkpoint, recipe) or 0)
    if checkpoint.graph is not None:
        stored, exported = exported_graph.matrices(checkpoint)
    weights = Weights(stored, recipe.precision, recipe.group_size, calibrated, recipe.head_precision)
    matrix = _announced(weights.matrix, stored, notify)
    if checkpoint.graph is not None:
        model = exported.with_weights(matrix)
    else:
        adapters = LoraGraph(opened, arch.vocab_size, weights, _computes_in_f32(recipe)) if opened else None
        model = graph.decoder(arch, matrix, weights.vector, adapters, weights.stacked, rounded)
    notify("writing openvino_model.xml and openvino_model.bin")
    openvino_engine.save(model, folder)
    checkpoint.copy_side_files(folder)
    detokenizer.write(folder / "tokenizer.json", arch.vocab_size, folder)
    detokenizer.write_checker(arch, folder)
    _check_generation_config(checkpoint, folder)


def adapter_first_token_id(checkpoint: Checkpoint, recipe: Recipe) -> int | None:
    """The id that most prompts begin with, see python_backends/adapters.py; None without adapters."""
    return side_files.first_token_id(checkpoint.folder, checkpoint.bos_token_id) if recipe.adapters else None


def _check_generation_config(checkpoint: Checkpoint, folder: Path) -> None:
    """The pipeline reads this file when it loads, all of it."""
    import openvino_genai

    try:
        openvino_genai.GenerationConfig(str(folder / "generation_config.json"))
    except RuntimeError as exc:
        path, message = checkpoint.folder / "generation_config.json", " ".join(str(exc).split())
        raise CheckpointError(f"{path}: a field has the wrong type: {message[-200:]}") from exc


def require_servable(folder: Path, engine_properties: Mapping[str, str], arch: Architecture) -> None:
    """Raises CheckpointError where continuous batching cannot run an exported graph, or leaves out a part of its
    attention (a bias of the distance, a window), which it does without a word."""
    length = max(1, min(SERVED_PROMPT, arch.max_positions - SERVED_TOKENS))
    prompt = np.random.default_rng(0).integers(0, arch.vocab_size, (1, length))
    try:
        _answer(folder, engine_properties, prompt)
        ids, found = _answer(folder, EXACT, prompt)
        read = OpenVinoEngine(folder, EXACT, arch.vocab_size).logits(np.append(prompt[0], ids)[None])
        expected = log_softmax(next(read)[length - 1 : -1])[range(len(ids)), ids]
        if (difference := float(np.abs(expected - found).max())) <= SERVED_DIFFERENCE:
            return
        problem = f"it leaves out a part of the attention: log probabilities differ by up to {difference:.2g} nats"
    except RuntimeError as exc:
        problem = " ".join(str(exc).split())[-300:]
    raise CheckpointError(f"the exported graph cannot be served by continuous batching: {problem}")


def _answer(folder: Path, properties: Mapping[str, str], prompt: np.ndarray) -> tuple[list[int], list[float]]:
    """The greedy tokens after i64[1, n] ids, and their log probabilities, by continuous batching."""
    import openvino_genai

    scheduler, options = openvino_genai.SchedulerConfig(), openvino_genai.GenerationConfig()
    scheduler.num_kv_blocks = 2 * (SERVED_PROMPT + SERVED_TOKENS) // BLOCK_TOKENS
    options.max_new_tokens, options.ignore_eos, options.logprobs = SERVED_TOKENS, True, 1
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", dict(properties))
    handle = pipeline.add_request(0, ov.Tensor(prompt), options)
    for _ in range(4 * SERVED_TOKENS):
        if not pipeline.has_non_finished_requests():
            output = handle.read_all()[0]
            return output.generated_ids, output.generated_log_probs
        pipeline.step()
    raise RuntimeError("it does not end")


def _calibration_blocks(checkpoint: Checkpoint, recipe: Recipe, notify: Notify) -> np.ndarray:
    """i64[n, t] token ids of the recipe's calibration texts, or of the default ones."""
    requested = recipe.calibration or CpuCalibration()
    length = min(requested.max_seq_length, checkpoint.architecture.max_positions)
    ids = read_blocks(checkpoint, requested.dataset, size=requested.size, max_seq_length=length).ids
    notify(f"calibrating on {len(ids)} sequences of {ids.shape[1]} tokens from {requested.dataset}")
    return ids


def _announced(matrix: graph.Weight, checkpoint: Checkpoint, notify: Notify) -> graph.Weight:
    """``matrix`` that says how far it has come, every two seconds at most."""
    sizes = {name: math.prod(tensor.shape) for name, tensor in checkpoint.tensors.items()}
    seen: set[str] = set()
    reported_s = time.monotonic()

    def announced(name: str) -> ov.Node:
        nonlocal reported_s
        if time.monotonic() - reported_s > 2:
            reported_s = time.monotonic()
            notify(f"weights {100 * sum(sizes[n] for n in seen) // sum(sizes.values())} %")
        seen.add(name)
        return matrix(name)

    return announced


def check(checkpoint: Checkpoint, recipe: Recipe) -> None:
    """Refuses, before anything long starts, what recipe and checkpoint cannot do together and no rule refuses."""
    if not checkpoint.eos_token_ids:
        problem = "neither generation_config.json nor config.json has an eos_token_id"
        raise CheckpointError(f"{checkpoint.folder}: {problem}")
    arch, adapters = checkpoint.architecture, ", ".join(adapter.name for adapter in recipe.adapters)
    if adapters and arch.exported:
        problem = f"must be left out for {arch.name}, whose graph optimum-intel writes; got {adapters}"
        raise InvalidArgument("adapters", problem)
    if adapters and recipe.precision == "int8_sq":
        problem = f"must be left out with precision 'int8_sq', which scales what adapters multiply; got {adapters}"
        raise InvalidArgument("adapters", problem)
    if recipe.precision == "int8_sq" and arch.exported:
        problem = f"must be bf16, fp16, fp32, int8 or int4 for {arch.name}, whose graph optimum-intel writes"
        raise InvalidArgument("precision", f"{problem}; got 'int8_sq'")
    if recipe.calibration and arch.exported:
        problem = f"needs a family the torch-free builder has; {arch.name} is none"
        raise InvalidArgument("calibration", problem)
    if recipe.kv_cache_precision == "bf16" and _computes_in_f32(recipe):
        raise InvalidArgument("kv_cache_precision", "must be f32, f16 or u8 with fp32 weights, got 'bf16'")


def properties(recipe: Recipe) -> dict[str, str]:
    """What OpenVINO opens the engine with: the recipe's precisions decide between exact and fast.

    Keys and values in f32 or f16, or fp32 weights: f32 compute, activations never quantised. KV in u8 or bf16: the
    plugin's own choice, which is bf16 where the CPU has it and int8 activations for int8 and int4 weights; about
    twice as fast, but a request's text then depends on what is batched with it. Of 24 sampled texts of the demo model
    made alone and together 24 were equal with f32 KV, 22 with f16, 14 to 21 with bf16 or u8.
    """
    kv = {"KV_CACHE_PRECISION": recipe.kv_cache_precision}
    if _computes_in_f32(recipe):
        return kv | {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    # u8 works with whatever the CPU computes in; bf16 keys and values only with bf16.
    return kv | ({"INFERENCE_PRECISION_HINT": "bf16"} if recipe.kv_cache_precision == "bf16" else {})


def _computes_in_f32(recipe: Recipe) -> bool:
    return recipe.precision == "fp32" or recipe.kv_cache_precision in ("f32", "f16")
