"""The stages of one build, with their exact commands, what they need, and estimates of disk and time.

Nothing here was timed on a GPU: every estimate carries the arithmetic it comes from in ``basis``.
"""

from __future__ import annotations

from dataclasses import dataclass

from build.base import hardware, layout
from build.base.shape import Shape
from build.quality.evaluation import BLOCK_TOKENS, block_count
from build.recipe import choice, commands, memory
from build.recipe.recipe import Recipe
from build.recipe.schema import CPU, LLMAPI

HERE, CONTAINER = "here", "container"
IMAGE_GB = 14.2  # compressed size of the 26.04 to 26.07 images
DOWNLOAD_BYTES_S = 100e6
DISK_BYTES_S = 500e6
FLOPS_SHARE = 0.3  # of a card's dense bf16 peak, in a calibration pass
CPU_FLOPS = 50e9  # two cores of a laptop, in numpy or torch
AWQ_PASSES = 12  # one to measure, eleven scales tried per layer
EXPORT_S = 30  # by optimum-intel, of a small model
CPU_PARAMETERS_S = 40e6  # parameters read, quantised and written per second and core


@dataclass(frozen=True)
class Stage:
    """One step. argv: what runs; where: ``here`` or in the recipe's container; writes: what it leaves.

    disk_bytes and seconds are estimates, basis says how they come about. instead: another way to the same result.
    """

    name: str
    where: str
    needs_gpu: bool
    argv: tuple[str, ...]
    writes: str
    disk_bytes: int
    seconds: float
    basis: str
    instead: tuple[str, ...] = ()


def stages(recipe: Recipe, shape: Shape) -> list[Stage]:
    """In order: fetch, quantise or convert, verify, compile, package; a kind leaves out what it does not need.

    Verify comes before compile: what it measures is the quantised checkpoint, and nothing beyond its budget is worth a
    GPU's time. A CPU engine is verified inside its one command.
    """
    fetch = [_fetch(recipe, shape)] if commands.fetch(recipe) else []
    if recipe.kind == CPU:
        return [*fetch, _compile_cpu(recipe, shape)]
    if recipe.kind == LLMAPI:
        return [*fetch, _export(recipe, shape), _verify(recipe, shape), _package(recipe)]
    return [*fetch, _checkpoint(recipe, shape), _verify(recipe, shape), _compile(recipe, shape), _package(recipe)]


def image_stage(recipe: Recipe) -> Stage:
    """Getting the container, once per machine."""
    size = int(IMAGE_GB * 1e9)
    basis = f"{IMAGE_GB:g} GB compressed at {DOWNLOAD_BYTES_S / 1e6:g} MB/s; about twice that unpacked"
    return Stage(
        "image", HERE, False, ("docker", "pull", recipe.image), recipe.image, size, size / DOWNLOAD_BYTES_S, basis
    )


def _fetch(recipe: Recipe, shape: Shape) -> Stage:
    size = 2 * shape.architecture.num_parameters()
    basis = f"2 bytes x parameters at {DOWNLOAD_BYTES_S / 1e6:g} MB/s"
    writes = "the hub's cache" if recipe.kind == CPU else commands.model_dir(recipe.model, recipe.revision)
    return Stage(
        "fetch", HERE, False, tuple(commands.fetch(recipe) or ()), writes, size, size / DOWNLOAD_BYTES_S, basis
    )


def _checkpoint(recipe: Recipe, shape: Shape) -> Stage:
    size = memory.checkpoint_bytes(recipe, shape.architecture)
    calibrated = commands.checkpoint_route(recipe, shape) == commands.QUANTIZE
    seconds, basis = _calibration_s(recipe, shape) if calibrated else (0.0, "no calibration")
    seconds += (2 * shape.architecture.num_parameters() + size) / DISK_BYTES_S
    basis += f"; read and write at {DISK_BYTES_S / 1e6:g} MB/s"
    own = commands.calibrates_here(recipe, shape)
    on_cpu = not own and commands.problem_on_cpu(recipe) is None
    return Stage(
        "quantise" if calibrated else "convert",
        HERE if own else CONTAINER,
        not own,
        tuple(commands.checkpoint(recipe, shape)),
        f"{layout.relative(layout.checkpoint(recipe.name))}/: config.json, {_ranks(recipe, 'safetensors')}",
        size,
        seconds,
        basis,
        instead=tuple(commands.checkpoint_on_cpu(recipe)) if on_cpu else (),
    )


def _calibration_s(recipe: Recipe, shape: Shape) -> tuple[float, str]:
    passes = AWQ_PASSES if "awq" in recipe.precision else 1
    texts, length = commands.calibration_size(recipe), recipe.texts.max_seq_length
    flops = 2.0 * shape.architecture.num_parameters() * texts * length * passes
    work = f"{passes} x 2 x parameters x"
    if commands.calibrates_here(recipe, shape):
        how = f"15 s to import torch, {work} {texts * length} tokens at {CPU_FLOPS / 1e9:g} GFLOP/s"
        return 15 + flops / CPU_FLOPS, how
    card = hardware.find(str(recipe.gpu))
    how = f"{work} {texts} texts x {length} tokens at {FLOPS_SHARE:.0%} of {card.tflops:g} TFLOP/s"
    return flops / (FLOPS_SHARE * card.tflops * 1e12), how


def _compile(recipe: Recipe, shape: Shape) -> Stage:
    size = memory.checkpoint_bytes(recipe, shape.architecture)
    layers = shape.architecture.num_layers / recipe.pp
    per_layer = 4 if recipe.multiple_profiles else 2
    basis = f"rule of thumb: 30 s + {per_layer} s per layer of a rank, one worker per GPU; disk is the weights' size"
    writes = f"{layout.relative(layout.compiled(recipe.name))}/: config.json, {_ranks(recipe, 'engine')}"
    argv = tuple(commands.compile_engine(recipe, shape))
    return Stage("compile", CONTAINER, True, argv, writes, size, 30 + per_layer * layers, basis)


def _compile_cpu(recipe: Recipe, shape: Shape) -> Stage:
    size = memory.checkpoint_bytes(recipe, shape.architecture)
    parameters, requested = shape.architecture.num_parameters(), recipe.calibration
    settings, tokens = len(choice.candidates(recipe)), block_count(shape.architecture) * BLOCK_TOKENS
    pass_s = 2.0 * parameters * tokens / CPU_FLOPS
    seconds = settings * (2 + parameters / CPU_PARAMETERS_S + pass_s) + pass_s
    each = f"{settings} settings at most, each" if settings > 1 else "rule of thumb:"
    basis = f"{each} 2 s + {CPU_PARAMETERS_S / 1e6:g} M parameters a second, and the quality gate's {tokens} tokens at "
    basis += f"{CPU_FLOPS / 1e9:g} GFLOP/s, once for the reference too; disk is the weights' size"
    if shape.architecture.exported:
        seconds, basis = seconds + EXPORT_S, f"{EXPORT_S} s to import torch and export; {basis}"
    if requested is not None:  # a pass over the texts, and per weight what moves the columns after it
        tokens, columns = requested.size * requested.max_seq_length, shape.architecture.hidden_size
        seconds += 2.0 * parameters * (tokens + columns) / CPU_FLOPS
        basis += f"; calibrating: 2 x parameters x ({tokens} tokens + {columns}) at {CPU_FLOPS / 1e9:g} GFLOP/s"
    writes = (
        f"{layout.relative(layout.ENGINES / recipe.name)}/: openvino_model.xml, openvino_model.bin, tokenizer, manifest"
    )
    return Stage("compile", HERE, False, tuple(commands.build_engine(recipe)), writes, size, seconds, basis)


def _export(recipe: Recipe, shape: Shape) -> Stage:
    size = memory.checkpoint_bytes(recipe, shape.architecture)
    seconds, basis = _calibration_s(recipe, shape) if recipe.precision != "bf16" else (0.0, "no calibration")
    seconds += (2 * shape.architecture.num_parameters() + size) / DISK_BYTES_S
    writes = f"{layout.relative(layout.checkpoint(recipe.name))}/: a Hugging Face checkpoint with hf_quant_config.json"
    argv = tuple(commands.checkpoint_on_cpu(recipe))  # ModelOpt takes the GPU where there is one
    return Stage("quantise", HERE, False, argv, writes, size, seconds, basis)


def _package(recipe: Recipe) -> Stage:
    also = ", the ensemble's and detokenizer's" if recipe.kind != LLMAPI else ""
    writes = f"model_repository/engine/configs/{recipe.name}.pbtxt{also}; tokenizer and manifest"
    return Stage("package", HERE, False, tuple(commands.build_engine(recipe)), writes, 16_000, 1, "small text files")


def _verify(recipe: Recipe, shape: Shape) -> Stage:
    q = recipe.quality
    writes = (
        f"{layout.relative(layout.evaluation(recipe.name))}; refused beyond perplexity x {q.perplexity_ratio:g}, "
        f"top-1 agreement below {q.top1_agreement:g} or KL above {q.kl:g} nats"
    )
    tokens = block_count(shape.architecture) * BLOCK_TOKENS
    seconds = 20 + 2 * 2.0 * shape.architecture.num_parameters() * tokens / CPU_FLOPS
    basis = f"two models x 2 x parameters x {tokens} tokens at {CPU_FLOPS / 1e9:g} GFLOP/s, and a sanity prompt each"
    return Stage("verify", HERE, False, tuple(commands.verify(recipe)), writes, 10_000, seconds, basis)


def _ranks(recipe: Recipe, suffix: str) -> str:
    return f"rank0.{suffix}" if recipe.world_size == 1 else f"rank0 to rank{recipe.world_size - 1}.{suffix}"
