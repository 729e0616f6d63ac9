"""Measure the demo model in every precision against itself in bf16; write docs/quality.md.

    python -m build.quality_table

CPU engines are compiled and measured through OpenVINO, in the arithmetic they serve with. ModelOpt's checkpoints are
made in the engine-building environment and measured in simulated numerics. Both are kept in .cache/quality/ and made
again when weights or code have changed.
"""

import argparse
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from build.base import digest, layout, program
from build.base.checkpoint import Checkpoint, open_checkpoint
from build.base.stage_record import StageRecords
from build.model.calibration import open_tokenizer
from build.model.openvino_engine import OpenVinoEngine
from build.package import compile_cpu
from build.quality import comparison, evaluation, sanity
from build.quality.evaluation import LogitsSource, Simulated
from build.quantise import environment
from build.recipe import provenance
from build.recipe import recipe as recipes
from build.recipe.recipe import DEFAULT_QUALITY
from contract.errors import EngineFailed

MODEL = layout.ROOT / "build" / "demo_model" / "checkpoint"
CACHE = layout.ROOT / ".cache" / "quality"
DOCUMENT = layout.ROOT / "docs" / "quality.md"
TO_NEAREST = "int4 to nearest (CPU)"  # without calibration
# name: (weights, KV cache)
CPU_ROWS = {"bf16 (CPU)": ("bf16", "f32"), "int8 (CPU)": ("int8", "u8")}
CPU_ROWS |= {"int4 (CPU)": ("int4", "u8"), TO_NEAREST: ("int4", "u8")}
GPU_ROWS = {"fp8": ("fp8", "fp8"), "int8_sq": ("int8_sq", ""), "int4_awq": ("int4_awq", "")}
GPU_ROWS |= {"w4a8_awq": ("w4a8_awq", "fp8")}
BLOCK = 64  # columns that share a scale; a small model's rows are short
SOURCES = """
    model/calibration.py model/graph.py model/weights.py package/compile_cpu.py quantise/exporters.py
    quantise/quantize.py recipe/quantization.py
""".split()


def cpu_engine(name: str, precision: str, kv: str, model: Checkpoint) -> tuple[LogitsSource, int]:
    """The engine and the bytes of its weights."""
    made = recipes.load(layout.RECIPES / "demo.toml").changed(
        group_size=BLOCK,
        precision=precision,
        kv_cache_precision=kv,
        calibration=recipes.CPU_CALIBRATION if precision == "int4" and name != TO_NEAREST else None,
    )
    folder = CACHE / name.replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
    folder.mkdir(parents=True)
    compile_cpu.compile_cpu(model, made, folder, lambda line: None)
    size = (folder / "openvino_model.bin").stat().st_size
    return OpenVinoEngine(folder, compile_cpu.properties(made), model.architecture.vocab_size), size


def checkpoint(name: str, qformat: str, kv: str, model: Checkpoint) -> tuple[LogitsSource, int]:
    """ModelOpt's checkpoint, made now or found unchanged, and the bytes of its weights."""
    folder = CACHE / name
    argv = ["python", "-m", "build.quantise.quantize", "--model_dir", str(layout.relative(MODEL)), "--qformat", qformat]
    argv += ["--kv_cache_dtype", kv] if kv else []
    argv += ["--awq_block_size", str(BLOCK), "--output_dir", str(layout.relative(folder)), "--overwrite"]
    argv += "--calib_dataset cpython --calib_size 32 --batch_size 8 --calib_max_seq_length 256".split()
    records = StageRecords(CACHE)
    key = digest.sha256_json([model.sha256(), argv, provenance.versions(SOURCES)["builder"]])
    if records.problem(name, key) is not None:
        line = environment.run_by(argv)
        print(f"$ {' '.join(line)}", flush=True)
        done = subprocess.run(line, cwd=layout.ROOT, stdout=subprocess.DEVNULL)
        if done.returncode != 0:
            raise EngineFailed(f"{name} could not be quantised; its output stands above")
        records.write(name, key, [folder])
    quantised, size = comparison.open_candidate(folder)
    return Simulated.of(quantised, model.architecture.vocab_size, name, print), size


def measure(model: Checkpoint) -> tuple[str, dict[str, str], int]:
    """The table, what each row says after the prompt, and the number of predicted tokens."""
    against = evaluation.ReferenceRun(model, print)
    _, decode, _ = open_tokenizer(model)
    rows, replies = [], {"reference": decode(against.reply.ids)}
    for name, (precision, kv) in (CPU_ROWS | GPU_ROWS).items():
        engine, size = (cpu_engine if name in CPU_ROWS else checkpoint)(name, precision, kv, model)
        logits = {name: engine.logits(against.blocks)}
        scores = comparison.compare(against.logits(), logits, against.blocks)[name]
        reply = against.reply_of(engine)
        replies[name] = decode(reply.ids)
        problem = sanity.problem(reply, against.reply)
        verdict = comparison.judge(scores, DEFAULT_QUALITY[precision], sanity_problem=problem)
        rows.append((name, scores, size / 1e6, verdict))
    return comparison.table(rows), replies, rows[0][1].tokens


def document(table: str, replies: dict[str, str], tokens: int) -> str:
    samples = "\n".join(f"| {name} | `{text!r}` |" for name, text in replies.items())
    machine = f"{platform.machine()} with Python {platform.python_version()}"
    return f"""\
# Quality by precision

Written by `make quality`, which is `.venv/bin/python -m build.quality_table`, on {machine}: the demo model
over {tokens} predicted tokens of library modules that it never saw. The reference: its bf16 weights in f32 arithmetic.
The text is the running Python's own library, so another version of Python gives other perplexities; every build says
and records which it was.

{table}

Rows with (CPU) are engines measured through OpenVINO with the KV cache they serve with: f32 for bf16, u8 for int8 and
int4 (groups of {BLOCK}). Their int4 is calibrated on 32 texts of 256 tokens (`build/model/gptq.py`) or
rounded to nearest, as the row says. The others are TensorRT-LLM checkpoints as ModelOpt calibrates and exports them:
32 texts of 256 tokens, AWQ blocks of {BLOCK}, an FP8 KV cache for fp8 and w4a8_awq. Their weights are read back and
dequantised, and inputs and KV cache rounded as the engine's kernels round them. No GPU has run them.

An engine whose gate is "refused" is not packaged unless `--accept-quality` gives a reason, which its manifest then
records. The budgets are the recipes' defaults (`build/recipe/recipe.py`).

## Continuations of one prompt

Greedy decoding of at most 32 tokens after `{sanity.PROMPT!r}`. The demo model is small and repeats itself in bf16 too;
a format that changes the first tokens shows here before its averages do.

| engine | continuation |
|---|---|
{samples}
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--print", action="store_true", help="do not write docs/quality.md")
    options = parser.parse_args(arguments)
    table, replies, tokens = measure(open_checkpoint(MODEL))
    print(table)
    if not options.print:
        Path(DOCUMENT).write_text(document(table, replies, tokens), encoding="utf-8")
        print(f"written to {layout.relative(DOCUMENT)}")
    return 0


if __name__ == "__main__":
    sys.exit(program.run(main, "quality"))
