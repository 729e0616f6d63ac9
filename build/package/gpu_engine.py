"""The engine of a GPU recipe, stage by stage: fetch, quantise, verify, compile, package.

Every stage that finished leaves a record (``stage_record.py``) and is not run again while nothing it is made from has
changed; so a build goes on after a kill, and on the GPU machine with what was made elsewhere. The command of each is
printed before it runs, and its output kept in ``engines/<engine>/logs/<stage>.log``.
"""

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from build.base import digest, layout
from build.base import shape as shapes
from build.base.checkpoint import Checkpoint, open_checkpoint
from build.base.fetch import fetch
from build.base.hardware import present
from build.base.json_fields import BadField, read_object
from build.base.program import Notify
from build.base.stage_record import StageRecords
from build.model import lora_adapter
from build.package import compile_trtllm, container, engine_folder, model_configs, side_files
from build.package import plan as plans
from build.package.plan import CONTAINER, Stage
from build.quality import evaluation
from build.quantise import environment
from build.recipe import commands, provenance
from build.recipe.recipe import Recipe
from build.recipe.verdict import require
from contract.errors import EngineFailed, Unavailable

# The sources that decide what a stage leaves. A change in one makes the stage run again. Which imports of quantise and
# verify are left out, tests/build/package/test_gpu_engine.py says.
_QUANTISE = """
    base/architecture.py base/rope.py demo_model/corpus.py model/calibration.py quantise/exporters.py
    quantise/quantize.py recipe/quantization.py
""".split()
SOURCES = {
    "quantise": _QUANTISE,
    "convert": _QUANTISE,
    "verify": """
        base/architecture.py base/checkpoint.py base/numerics.py base/rope.py base/shards.py demo_model/corpus.py
        model/calibration.py model/decoder.py quality/comparison.py quality/evaluation.py quality/sanity.py
        quantise/hf_quantised.py quantise/quantised_linear.py quantise/trtllm_checkpoint.py
    """.split(),
    "compile": [],
    "package": [
        "package/model_configs.py",
        "package/gpu_adapters.py",
        *(f"trtllm/{model}.pbtxt" for model in model_configs.BARE_ENGINE_STEPS),
    ],
}


def build(recipe: Recipe, notify: Notify, accept: str | None = None) -> Path:
    """The engine's folder, every stage done. accept: why an engine beyond its quality budget is packaged.

    Raises verdict.Refused for a recipe the rules refuse, WrongMachine or Unavailable where a stage cannot run on this
    machine (what is finished stays finished), EngineFailed where a program failed.
    """
    folder = layout.ENGINES / recipe.name
    engine_folder.make(layout.ENGINES)
    with engine_folder.only_builder(folder, notify):
        return _Build(recipe, folder, notify, accept).run()


class _Build:
    def __init__(self, recipe: Recipe, folder: Path, notify: Notify, accept: str | None) -> None:
        self._recipe, self._folder, self._notify, self._accept = recipe, folder, notify, accept
        self._records = StageRecords(folder)
        self._ran = 0

    def run(self) -> Path:
        recipe = self._recipe
        model = self._fetch()
        self._shape = shapes.find(recipe.model, revision=recipe.revision)
        plan = plans.make(recipe, self._shape)
        require(recipe, plan.findings)
        for finding in plan.findings:
            self._notify(f"{plans.ATTENTION[finding.severity.value]} {finding.rule}: {finding.message}")
        run = {
            "quantise": self._quantise,
            "convert": self._quantise,
            "verify": self._verify,
            "compile": self._compile,
            "package": lambda stage: model_configs.package(recipe, plan.shape, model),
        }
        made = {"fetch": model.sha256()}
        for stage in plan.stages:
            if stage.name not in run:
                continue  # the image is pulled by the container runtime, the model is fetched
            # Another budget is verified again, and nothing is compiled again for it.
            inputs = {name: sha for name, sha in made.items() if name != "verify" or stage.name == "package"}
            made[stage.name] = self._stage(stage, digest.sha256_json(inputs), run[stage.name])
        done = "is ready" if self._ran else "is up to date"
        self._notify(f"{layout.relative(self._folder)} {done} ({recipe.precision} from {recipe.model})")
        return self._folder

    def _fetch(self) -> Checkpoint:
        model, revision = self._recipe.model, self._recipe.revision
        if (argv := commands.fetch(self._recipe)) is None:
            folder = fetch(model)
        else:
            self._notify(f"fetch: $ {commands.line(environment.run_by(argv))}")
            folder = fetch(model, revision, layout.fetched_model(model, revision))
        checkpoint = open_checkpoint(folder)
        side_files.check(folder, self._notify)
        return checkpoint

    def _stage(self, stage: Stage, inputs: str, run: Callable[[Stage], Sequence[Path]]) -> str:
        """Runs the stage unless it is done; a digest of what it made, as ``inputs`` is of the stages it builds on."""
        key = digest.sha256_json([inputs, list(stage.argv), self._sources(stage.name)])
        problem = self._records.problem(stage.name, key)
        if problem is None:
            self._notify(f"{stage.name}: done before")
        else:
            started_s = time.monotonic()
            self._notify(f"{stage.name}: {problem}")
            if stage.name in ("quantise", "convert", "verify"):
                evaluation.unmeasured(self._recipe, self._accept)  # before it costs time, not at its end
            self._records.forget(stage.name)
            engine_folder.require_room(self._folder.parent, stage.disk_bytes)
            (self._folder / "manifest.json").unlink(missing_ok=True)  # half-built: not to be served
            self._records.write(stage.name, key, run(stage))
            self._ran += 1
            self._notify(f"{stage.name}: done in {time.monotonic() - started_s:.1f} s")
        return self._records.digest(stage.name)

    def _sources(self, stage: str) -> dict[str, str]:
        sources = {name: digest.sha256_file(layout.ROOT / "build" / name) for name in SOURCES[stage]}
        recipe = self._recipe
        if stage in ("quantise", "convert"):
            placed = commands.put_in_place(recipe, self._shape)
            sources |= {"modelopt": commands.modelopt(), "heads": str(placed and commands.draft_mode(recipe))}
            if texts := provenance.texts_sha256(recipe.texts.dataset):
                sources["texts"] = texts
        if stage != "package":
            sources["environment"] = digest.sha256_json(recipe.environment)
        if stage == "verify":
            sources["budget"] = repr(recipe.quality)
        if stage in ("compile", "package"):
            sources["image"] = recipe.image
        if stage == "package":
            sources |= {a.name: lora_adapter.record(a.name, a.path).sha256 for a in recipe.adapters}
            sources["recipe"] = hashlib.sha256(repr(recipe).encode()).hexdigest()
        return sources

    def _quantise(self, stage: Stage) -> list[Path]:
        output, mode = layout.checkpoint(self._recipe.name), commands.draft_mode(self._recipe)
        where, architecture = layout.relative(output), _architecture(output)
        if commands.put_in_place(self._recipe, self._shape):
            begins = commands.HEADS[str(mode)]
            if not architecture.startswith(begins):
                problem = f"architecture must begin with {begins!r}, got {architecture or 'no file'}"
                why = f"no stage makes the draft heads of mode {mode!r}, so put the checkpoint in place first (rule U2)"
                raise Unavailable(f"{where}/config.json: {problem}: {why}")
            return [output]
        if any(other != mode and architecture.startswith(begins) for other, begins in commands.HEADS.items()):
            problem = f"is a checkpoint of {architecture}, which this recipe does not make: move it away"
            raise EngineFailed(f"{where} {problem}")
        lines = self._quantise_lines(stage)
        shutil.rmtree(output, ignore_errors=True)
        self._execute(stage, lines)
        return [output]

    def _quantise_lines(self, stage: Stage) -> list[list[str]]:
        """In the container where this machine could compile too, else by our own stage where it can."""
        if stage.where != CONTAINER:
            return [environment.run_by(stage.argv)]
        runtime = container.runtime() if any(sm == self._recipe.sm for _, sm in present()) else None
        if runtime is not None:
            return container.entered(stage.argv, self._recipe, runtime)
        if stage.instead:
            return [environment.run_by(stage.instead)]
        needs = f"{stage.name} needs a GPU of SM {self._recipe.sm} and the image {self._recipe.image}"
        why = f"build.quantise.quantize {commands.problem_on_cpu(self._recipe)}"
        run = commands.line(commands.build_engine(self._recipe))
        raise Unavailable(f"{needs}, because {why}: run `{run}` on such a machine")

    def _verify(self, stage: Stage) -> list[Path]:
        accepted = () if self._accept is None else ("--accept-quality", self._accept)
        self._execute(stage, [environment.run_by((*stage.argv, *accepted))])
        return [layout.evaluation(self._recipe.name)]

    def _compile(self, stage: Stage) -> list[Path]:
        output, built_on = layout.compiled(self._recipe.name), layout.built_on(self._recipe.name)
        runtime = compile_trtllm.check_machine(self._recipe)
        shutil.rmtree(output, ignore_errors=True)
        compile_trtllm.compile_trtllm(self._recipe, self._shape)
        lines = container.entered(["python3", "server/machine.py"], self._recipe, runtime)
        built_on.write_text(_answer(container.output(lines[-1], self._recipe)) + "\n")
        return [output, built_on]

    def _execute(self, stage: Stage, lines: Sequence[Sequence[str]]) -> None:
        log = layout.logs(self._recipe.name) / f"{stage.name}.log"
        for line in lines:
            if (status := container.run(line, self._recipe, log)) != 0:
                raise EngineFailed(_failure(stage.name, status, log))


def _architecture(checkpoint: Path) -> str:
    """As the config.json of a TensorRT-LLM checkpoint names it; "" where there is none."""
    try:
        return str(read_object(checkpoint / "config.json").get("architecture", ""))
    except (OSError, BadField):
        return ""


def _answer(output: str) -> str:
    """The JSON among what a program printed: an image's entry point says its own before, docker its warnings after."""
    for line in reversed(output.splitlines()):
        with contextlib.suppress(ValueError):
            if isinstance(json.loads(line), dict):
                return line.strip()
    raise EngineFailed(f"server/machine.py printed no JSON, but: {output.strip()[-200:]!r}")


def _failure(stage: str, status: int, log: Path) -> str:
    """The program's own last sentence where it gave one."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    reason = next((line.removeprefix("error") for line in reversed(lines[-5:]) if line.startswith("error: ")), "")
    return f"{stage} failed with status {status}{reason} (its output is in {layout.relative(log)})"
