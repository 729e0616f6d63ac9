"""The plan: what building an engine will do, need and take, before anything is done.

``python -m build.engine --engine NAME --dry-run`` prints it; it needs neither a GPU nor the model's weights.
Estimates of stages were not timed on a GPU: each carries the arithmetic it comes from in ``basis``.
"""

import textwrap
from dataclasses import dataclass

from build.base import hardware, layout
from build.base.shape import Shape
from build.quality.evaluation import BLOCK_TOKENS, block_count
from build.recipe import choice, commands, memory
from build.recipe.case import Case, Finding, Severity
from build.recipe.recipe import Recipe
from build.recipe.schema import CPU, LLMAPI, MEASURED_KV, TRTLLM
from build.recipe.verdict import judge, refused

GIB = memory.GIB
TYPICAL = ((128, 128), (500, 500), (1000, 1000), (2048, 2048), (5000, 500))  # prompt and output tokens
ATTENTION = {"refuse": "refused", "warn": "warning", "inform": "note"}
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
    """argv: what runs; where: ``here`` or in the recipe's container; writes: what it leaves. disk_bytes and seconds are
    estimates, basis says how they come about. instead: another way to the same result."""

    name: str
    where: str
    needs_gpu: bool
    argv: tuple[str, ...]
    writes: str
    disk_bytes: int
    seconds: float
    basis: str
    instead: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """stages is empty when a finding refuses the recipe; footprint is then None too."""

    recipe: Recipe
    shape: Shape
    findings: tuple[Finding, ...]
    footprint: memory.Footprint | None
    stages: tuple[Stage, ...]

    @property
    def refused(self) -> bool:
        return refused(self.findings)


def make(recipe: Recipe, shape: Shape) -> Plan:
    """The plan of a recipe. Looks at local folders the recipe names and at this machine's memory."""
    findings = judge(Case(recipe, shape, memory_here=hardware.memory_bytes()))
    if refused(findings):
        return Plan(recipe, shape, findings, None, ())
    image = () if recipe.kind == CPU else (image_stage(recipe),)
    footprint = memory.footprint(recipe, shape.architecture)
    return Plan(recipe, shape, findings, footprint, (*image, *stages(recipe, shape)))


def concurrency(plan: Plan) -> list[dict[str, int]]:
    """Rows of prompt, output and how many such sequences run at once: bounded by the KV pool, by max_batch_size and by
    max_num_tokens, of which a sequence takes one a step and one more for every draft token."""
    recipe, foot = plan.recipe, plan.footprint
    assert foot is not None and recipe.max_seq_len is not None
    draft = commands.draft_len(recipe)
    per_step = limits(recipe)["max_num_tokens"] // (recipe.max_beam_width * (1 + draft))
    most = max(1, min(recipe.max_batch_size, per_step))
    pairs = [pair for pair in TYPICAL if sum(pair) < recipe.max_seq_len]
    pairs.append((recipe.max_seq_len // 2, recipe.max_seq_len - recipe.max_seq_len // 2))
    rows = []
    for prompt, output in pairs:
        fit = foot.sequences(prompt + output + draft)
        row = {"prompt_tokens": prompt, "output_tokens": output, "total_tokens": prompt + output}
        rows.append(row | {"fit_in_kv_pool": fit, "run_at_once": min(fit, most)})
    return rows


def limits(recipe: Recipe) -> dict[str, int]:
    """Limits and features the engine will really have, where the builder would change them silently."""
    made = {
        "max_batch_size": recipe.max_batch_size,
        "max_num_tokens": recipe.max_num_tokens,
        "max_seq_len": recipe.max_seq_len or 0,
        "max_beam_width": recipe.max_beam_width,
        "prefix_reuse": recipe.prefix_reuse,
        "chunked_context": recipe.chunked_context,
    }
    if recipe.kind == TRTLLM:
        paged = commands.paged_context_fmha(recipe)
        made |= {"prefix_reuse": recipe.prefix_reuse and paged, "chunked_context": recipe.chunked_context and paged}
        made["max_num_tokens"] = commands.max_num_tokens(recipe)
        made["max_seq_len"] += commands.draft_len(recipe)
    return made


def stages(recipe: Recipe, shape: Shape) -> list[Stage]:
    """In order: fetch, quantise or convert, verify, compile, package; a kind leaves out what it does not need. Verify
    comes first: nothing beyond its budget is worth a GPU's time. A CPU engine is verified inside its one command."""
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
    argv = ("docker", "pull", recipe.image)
    return Stage("image", HERE, False, argv, recipe.image, size, size / DOWNLOAD_BYTES_S, basis)


def _fetch(recipe: Recipe, shape: Shape) -> Stage:
    size = 2 * shape.architecture.num_parameters()
    basis = f"2 bytes x parameters at {DOWNLOAD_BYTES_S / 1e6:g} MB/s"
    writes = "the hub's cache" if recipe.kind == CPU else commands.model_dir(recipe.model, recipe.revision)
    argv = tuple(commands.fetch(recipe) or ())
    return Stage("fetch", HERE, False, argv, writes, size, size / DOWNLOAD_BYTES_S, basis)


def _checkpoint(recipe: Recipe, shape: Shape) -> Stage:
    size = memory.checkpoint_bytes(recipe, shape.architecture)
    calibrated = commands.checkpoint_route(recipe, shape) == commands.QUANTIZE
    seconds, basis = _calibration_s(recipe, shape) if calibrated else (0.0, "no calibration")
    seconds += (2 * shape.architecture.num_parameters() + size) / DISK_BYTES_S
    basis += f"; read and write at {DISK_BYTES_S / 1e6:g} MB/s"
    own, argv = commands.calibrates_here(recipe, shape), tuple(commands.checkpoint(recipe, shape))
    on_cpu = not own and commands.problem_on_cpu(recipe) is None
    instead = tuple(commands.checkpoint_on_cpu(recipe)) if on_cpu else ()
    name, where = "quantise" if calibrated else "convert", HERE if own else CONTAINER
    writes = f"{layout.relative(layout.checkpoint(recipe.name))}/: config.json, {_ranks(recipe, 'safetensors')}"
    return Stage(name, where, not own, argv, writes, size, seconds, basis, instead)


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
    files = "openvino_model.xml, openvino_model.bin, tokenizer, manifest"
    writes = f"{layout.relative(layout.ENGINES / recipe.name)}/: {files}"
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
    writes = f"{layout.relative(layout.evaluation(recipe.name))}; refused beyond perplexity x {q.perplexity_ratio:g}, "
    writes += f"top-1 agreement below {q.top1_agreement:g} or KL above {q.kl:g} nats"
    tokens = block_count(shape.architecture) * BLOCK_TOKENS
    seconds = 20 + 2 * 2.0 * shape.architecture.num_parameters() * tokens / CPU_FLOPS
    basis = f"two models x 2 x parameters x {tokens} tokens at {CPU_FLOPS / 1e9:g} GFLOP/s, and a sanity prompt each"
    return Stage("verify", HERE, False, tuple(commands.verify(recipe)), writes, 10_000, seconds, basis)


def _ranks(recipe: Recipe, suffix: str) -> str:
    return f"rank0.{suffix}" if recipe.world_size == 1 else f"rank0 to rank{recipe.world_size - 1}.{suffix}"


def as_text(plan: Plan, verbose: bool = False) -> str:
    """The plan for people: verdict, warnings, sequences at once and commands; verbose adds limits and formulas."""
    parts = [_head(plan), _findings(plan)]
    if not plan.refused:
        parts += [_limits(plan), _memory(plan)] if verbose else []
        parts += [_concurrency(plan), _stages(plan, verbose)]
        parts += [] if verbose else ["Limits, memory formulas and how the estimates come about: --verbose"]
    return "\n\n".join(part for part in parts if part) + "\n"


def _verdict(plan: Plan) -> list[str]:
    """Does it fit, how many sequences at once, how long does the build take."""
    if plan.footprint is None:
        count = sum(finding.severity is Severity.REFUSE for finding in plan.findings)
        return [f"  verdict    refused by {count} rule{'s' if count > 1 else ''}, see below"]
    foot, rows = plan.footprint, concurrency(plan)
    if plan.recipe.kind == CPU:
        needs = f"needs {_binary(foot.fixed_bytes + foot.pool_bytes).strip()} of memory"
    else:
        needs = f"fits: {_binary(foot.fixed_bytes).strip()} of {(foot.available_bytes or 0) / GIB:g} GiB per GPU, "
        needs += f"{_binary(foot.pool_bytes).strip()} for the KV cache"
    shortest, longest = rows[0], rows[-1]
    most = f"{shortest['run_at_once']} sequences of {shortest['total_tokens']} tokens"
    most += f", {longest['run_at_once']} of {longest['total_tokens']}" if longest is not shortest else ""
    disk, seconds = sum(s.disk_bytes for s in plan.stages), sum(s.seconds for s in plan.stages)
    build = f"about {_time(seconds)} and {_size(disk)} of disk"
    return [f"  verdict    {needs}", f"  at once    {most}", f"  build      {build}"]


def _head(plan: Plan) -> str:
    recipe, parameters = plan.recipe, plan.shape.architecture.num_parameters()
    lines = [f"{recipe.name}: {recipe.description or recipe.model}", *_verdict(plan)]
    size = f"{parameters / 1e9:.2f} billion" if parameters >= 1e8 else f"{parameters / 1e6:.1f} million"
    lines.append(f"  model      {recipe.model}, {size} parameters ({plan.shape.source})")
    lines.append(f"  precision  {recipe.precision} weights, {recipe.kv_cache_precision} KV cache")
    if recipe.kv_cache_measured and plan.footprint is not None:
        wider = memory.footprint(recipe.changed(kv_cache_precision=MEASURED_KV[-1]), plan.shape.architecture)
        more = _binary(wider.total_bytes - plan.footprint.total_bytes).strip()
        lines[-1] += f"; {MEASURED_KV[-1]}, which takes {more} more, where the build measures it faster"
    if recipe.automatic:
        settings = "; ".join(choice.words(candidate) for candidate in choice.candidates(recipe))
        message = f"  chosen     by the build: the first to pass the quality gate of {settings}. This plan: the first"
        lines += textwrap.wrap(message, 116, subsequent_indent="             ")
    if recipe.kind == CPU:
        lines.append("  runs on    the CPU, OpenVINO GenAI")
    else:
        card = hardware.find(str(recipe.gpu))
        target = f"{recipe.world_size} x {card.name} ({card.generation}, SM {card.sm}, {card.memory_gib:g} GiB)"
        lines += [f"  runs on    {target}, tp {recipe.tp}, pp {recipe.pp}", f"  image      {recipe.image}"]
    return "\n".join(lines)


def _findings(plan: Plan) -> str:
    lines = []
    for finding in plan.findings:
        word = ATTENTION[finding.severity.value]
        lines += textwrap.wrap(f"{word} {finding.rule}: {finding.message}", 116, subsequent_indent="    ")
    return "\n".join(lines)


def _limits(plan: Plan) -> str:
    lines = ["What the engine will have"]
    for name, value in limits(plan.recipe).items():
        lines.append(f"  {name:<16} {('no', 'yes')[value] if isinstance(value, bool) else value}")
    return "\n".join(lines)


def _memory(plan: Plan) -> str:
    foot, recipe = plan.footprint, plan.recipe
    assert foot is not None
    formulas = memory.FORMULAS_CPU if recipe.kind == CPU else memory.FORMULAS
    pool = f"{foot.pool_tokens} tokens of {foot.kv_bytes_per_token / 1024:.1f} KiB"
    where = "Memory of the process"
    if foot.available_bytes is not None:
        where = f"Memory per GPU, of {foot.available_bytes / GIB:g} GiB"
    sizes = foot.weight_bytes, foot.activation_bytes, foot.buffer_bytes, foot.context_bytes, foot.pool_bytes
    lines = [where]
    for name, size in zip(("weights", "activations", "buffers", "context", "kv_pool"), sizes, strict=True):
        lines.append(f"  {name:<12} {_binary(size)}" + (f"  {pool}" if name == "kv_pool" else ""))
    for name, formula in formulas.items():
        lines += textwrap.wrap(f"  {name} = {formula}", 116, subsequent_indent="      ")
        if name == "kv_cache":
            lines.append(f"      here {memory.kv_arithmetic(recipe, plan.shape.architecture)}")
    return "\n".join(lines)


def _concurrency(plan: Plan) -> str:
    lines = [f"Concurrent sequences (limited by the KV pool and by max_batch_size {plan.recipe.max_batch_size})"]
    for row in concurrency(plan):
        what = f"{row['prompt_tokens']} in + {row['output_tokens']} out"
        full = "  = max_seq_len" if row["total_tokens"] == plan.recipe.max_seq_len else ""
        lines.append(f"  {what:<20} {row['run_at_once']:6d}   (KV pool: {row['fit_in_kv_pool']}){full}")
    return "\n".join(lines)


def _stages(plan: Plan, verbose: bool) -> str:
    disk, seconds = sum(s.disk_bytes for s in plan.stages), sum(s.seconds for s in plan.stages)
    lines = [f"Stages (about {_size(disk)} of disk and {_time(seconds)}; estimates, not measured)"]
    for number, stage in enumerate(plan.stages, start=1):
        where = "in the container" if stage.where == CONTAINER else "here"
        gpu = ", needs a GPU" if stage.needs_gpu else ""
        lines.append(f"  {number}. {stage.name} ({where}{gpu}): {_size(stage.disk_bytes)}, {_time(stage.seconds)}")
        inside = stage.where == CONTAINER
        argv = commands.in_docker(stage.argv, plan.recipe) if inside else stage.argv
        lines.append(f"     $ {commands.line(argv)}")
        if stage.instead:
            lines.append(f"     or without a GPU: $ {commands.line(stage.instead)}")
        if verbose:
            lines += [f"     inside the image: $ {commands.line(stage.argv)}"] if inside else []
            lines.append(f"     writes {stage.writes}")
            lines += textwrap.wrap(f"     estimate: {stage.basis}", 116, subsequent_indent="       ")
    return "\n".join(lines)


def _binary(count: float) -> str:
    return f"{count / GIB:7.2f} GiB" if count >= 0.1 * GIB else f"{count / 1024**2:7.2f} MiB"


def _size(count: float) -> str:
    if count >= 1e8:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.0f} kB"


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
