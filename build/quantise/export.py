"""Any decoder that optimum-intel knows, as an OpenVINO graph in f32: for families the torch-free builder does not have.

    .venv-build/bin/python -m build.quantise.export --model FOLDER --into FOLDER

writes openvino_model.xml and .bin and compares their logits with those of transformers. ``exported`` runs it from the
serving environment, which has no torch; what it writes is then compressed, measured and packaged as any model's graph.
Exit status 1, with one sentence, where the model cannot be exported.
"""

import argparse
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from build.base import layout, program
from build.base.checkpoint import Checkpoint
from build.base.json_fields import CheckpointError
from build.base.program import Notify
from build.quantise.environment import build_python

GRAPH = "openvino_model.xml"
TOLERANCE = 1e-3  # of the largest logit, between two f32 implementations of one model
CHECKED_TOKENS = 48
_FAILED = "cannot export: "


@contextmanager
def exported(checkpoint: Checkpoint, engine: Path, notify: Notify) -> Iterator[Path]:
    """The folder of the f32 graph, which is removed at the end; after a kill the next build of ``engine`` removes it.

    Raises Unavailable without the build environment, and CheckpointError for a model that cannot be exported.
    """
    python, name = build_python(), checkpoint.architecture.name
    notify(f"{name}: exported by optimum-intel in {python.parent.parent.name}, since no torch-free builder knows it")
    with TemporaryDirectory(dir=engine.parent, prefix=f"{engine.name}.partial-") as scratch:
        command = [str(python), "-m", __name__, "--model", str(checkpoint.folder.resolve()), "--into", scratch]
        quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, cwd=layout.ROOT, env=os.environ | quiet, capture_output=True, text=True)
        if done.returncode or not (Path(scratch) / GRAPH).exists():
            lines = (done.stderr.strip() or "no graph was written").splitlines()
            reason = next((line for line in reversed(lines) if line.startswith(_FAILED)), lines[-1])
            problem = " ".join(reason.removeprefix(_FAILED).split())[:400]
            raise CheckpointError(f"{checkpoint.folder}: optimum-intel cannot export {name}: {problem}")
        notify(done.stdout.strip().splitlines()[-1])
        yield Path(scratch)


def export(model: Path, into: Path) -> str:
    """Writes the graph and returns a line on how well it agrees. Raises ValueError where it does not."""
    import torch
    from optimum.exporters.openvino import main_export
    from optimum.intel.openvino import OVConfig
    from transformers import AutoModelForCausalLM

    from build.model.openvino_engine import EXACT, OpenVinoEngine

    torch.set_num_threads(os.cpu_count() or 1)
    main_export(
        model_name_or_path=str(model),
        output=into,
        task="text-generation-with-past",
        stateful=True,
        library_name="transformers",
        local_files_only=True,
        ov_config=OVConfig(dtype="fp32"),
        model_loading_kwargs={"dtype": torch.float32},
    )
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True).eval()
    ids = np.random.default_rng(0).integers(0, original.config.vocab_size, (1, CHECKED_TOKENS))
    with torch.inference_mode():
        expected = original(torch.tensor(ids)).logits[0].numpy()
    found = next(OpenVinoEngine(into, EXACT, original.config.vocab_size).logits(ids))
    difference = float(np.abs(found - expected).max() / np.abs(expected).max())
    if not difference <= TOLERANCE:
        raise ValueError(f"its logits differ from transformers' by {difference:.2g} of the largest")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("optimum-intel", "transformers", "torch"))
    return f"exported with {versions}; f32 logits differ from transformers' by {difference:.1g} of the largest"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--into", type=Path, required=True, help="folder for the graph")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    try:
        print(export(options.model, options.into))
    except Exception as exc:  # torch, transformers and the exporter raise anything; the first line says what
        raise SystemExit(_FAILED + (str(exc).strip() or type(exc).__name__).splitlines()[0]) from exc
    return 0


if __name__ == "__main__":
    sys.exit(program.run(main, "export"))
