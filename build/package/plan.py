"""The plan: what building an engine will do, need and take, before anything is done.

``python -m build.engine --engine NAME --dry-run`` prints it; it needs neither a GPU nor the model's weights.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from build.base import hardware, host
from build.base.shape import Shape
from build.package.stage import CONTAINER, Stage, image_stage, stages
from build.recipe import choice, commands, memory
from build.recipe.case import Case, Finding, Severity
from build.recipe.recipe import Recipe
from build.recipe.schema import CPU, MEASURED_KV, TRTLLM
from build.recipe.verdict import judge, refused

GIB = memory.GIB
TYPICAL = ((128, 128), (500, 500), (1000, 1000), (2048, 2048), (5000, 500))  # prompt and output tokens
ATTENTION = {"refuse": "refused", "warn": "warning", "inform": "note"}


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
    findings = judge(Case(recipe, shape, memory_here=host.memory_bytes()))
    if refused(findings):
        return Plan(recipe, shape, findings, None, ())
    image = () if recipe.kind == CPU else (image_stage(recipe),)
    footprint = memory.footprint(recipe, shape.architecture)
    return Plan(recipe, shape, findings, footprint, (*image, *stages(recipe, shape)))


def concurrency(plan: Plan) -> list[dict[str, int]]:
    """Rows of prompt, output and how many such sequences run at once.

    Bounded by the KV pool, by max_batch_size and by max_num_tokens, of which a sequence takes one a step and one more
    for every draft token.
    """
    recipe, foot = plan.recipe, plan.footprint
    assert foot is not None and recipe.max_seq_len is not None
    tokens = commands.max_num_tokens(recipe) if recipe.kind == TRTLLM else recipe.max_num_tokens
    draft = commands.draft_len(recipe)
    per_step = tokens // (recipe.max_beam_width * (1 + draft))
    most = max(1, min(recipe.max_batch_size, per_step))
    pairs = [pair for pair in TYPICAL if sum(pair) < recipe.max_seq_len]
    pairs.append((recipe.max_seq_len // 2, recipe.max_seq_len - recipe.max_seq_len // 2))
    fits = [foot.sequences(prompt + output + draft) for prompt, output in pairs]
    return [
        {
            "prompt_tokens": prompt,
            "output_tokens": output,
            "total_tokens": prompt + output,
            "fit_in_kv_pool": fit,
            "run_at_once": min(fit, most),
        }
        for (prompt, output), fit in zip(pairs, fits, strict=True)
    ]


def limits(recipe: Recipe) -> dict[str, object]:
    """Limits and features the engine will really have, where the builder would change them silently."""
    if recipe.kind != TRTLLM:
        features = {"prefix_reuse": recipe.prefix_reuse, "chunked_context": recipe.chunked_context}
        tokens, length = recipe.max_num_tokens, recipe.max_seq_len
    else:
        paged = commands.paged_context_fmha(recipe)
        features = {"prefix_reuse": recipe.prefix_reuse and paged, "chunked_context": recipe.chunked_context and paged}
        tokens = commands.max_num_tokens(recipe)
        length = (recipe.max_seq_len or 0) + commands.draft_len(recipe)
    return {
        "max_batch_size": recipe.max_batch_size,
        "max_num_tokens": tokens,
        "max_seq_len": length,
        "max_beam_width": recipe.max_beam_width,
        **features,
    }


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
        needs = (
            f"fits: {_binary(foot.fixed_bytes).strip()} of {(foot.available_bytes or 0) / GIB:g} GiB per GPU, "
            f"{_binary(foot.pool_bytes).strip()} for the KV cache"
        )
    shortest, longest = rows[0], rows[-1]
    most = f"{shortest['run_at_once']} sequences of {shortest['total_tokens']} tokens"
    most += f", {longest['run_at_once']} of {longest['total_tokens']}" if longest is not shortest else ""
    disk, seconds = sum(s.disk_bytes for s in plan.stages), sum(s.seconds for s in plan.stages)
    return [
        f"  verdict    {needs}",
        f"  at once    {most}",
        f"  build      about {_time(seconds)} and {_size(disk)} of disk",
    ]


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
    words = {True: "yes", False: "no"}
    limited = limits(plan.recipe).items()
    rows = [f"  {name:<16} {words[value] if isinstance(value, bool) else value}" for name, value in limited]
    return "\n".join(["What the engine will have", *rows])


def _memory(plan: Plan) -> str:
    foot, recipe = plan.footprint, plan.recipe
    assert foot is not None
    formulas = memory.FORMULAS_CPU if recipe.kind == CPU else memory.FORMULAS
    pool = f"{foot.pool_tokens} tokens of {foot.kv_bytes_per_token / 1024:.1f} KiB"
    rows = [
        ("weights", foot.weight_bytes, ""),
        ("activations", foot.activation_bytes, ""),
        ("buffers", foot.buffer_bytes, ""),
        ("context", foot.context_bytes, ""),
        ("kv_pool", foot.pool_bytes, pool),
    ]
    where = "Memory of the process"
    if foot.available_bytes is not None:
        where = f"Memory per GPU, of {foot.available_bytes / GIB:g} GiB"
    lines = [where] + [f"  {name:<12} {_binary(size)}  {note}".rstrip() for name, size, note in rows]
    for name in ("weights", "activations", "buffers", "context", "kv_cache", "kv_pool"):
        lines += textwrap.wrap(f"  {name} = {formulas[name]}", 116, subsequent_indent="      ")
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
