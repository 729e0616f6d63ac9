"""A GPU machine in miniature: folders of small real programs named nvidia-smi, docker and trtllm-build.

trtllm-build parses its arguments with the parser of the option table, and leaves the files the real one leaves, one
byte each. docker notes what it was asked and runs the command after the image, as itself.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from build.base import layout
from build.quality import evaluation
from build.recipe.recipe import Recipe

BUILDER = """\
import json, os, sys
sys.path.insert(0, {fakes!r})
import program_parser

if "--help" in sys.argv:
    text = program_parser.parser("trtllm_build").format_help()
    for flag in {hidden!r}:
        text = text.replace(flag, "")
    print(text, *{extra!r})
    sys.exit(0)
asked = program_parser.parser("trtllm_build").parse_args(sys.argv[1:])
print("[TRT-LLM] [I] PYTHONWARNINGS =", os.environ.get("PYTHONWARNINGS"), "NCCL_DEBUG =", os.environ.get("NCCL_DEBUG"))
if {fails!r}:
    print("[TRT-LLM] [E] out of memory", file=sys.stderr)
    sys.exit(7)
ranks = [name for name in os.listdir(asked.checkpoint_dir) if name.endswith(".safetensors")]
os.makedirs(asked.output_dir, exist_ok=True)
for rank in range(len(ranks) - {lost!r}):
    open(os.path.join(asked.output_dir, f"rank{{rank}}.engine"), "wb").write(b"0")
config = {{"version": {version!r}, "pretrained_config": {{}}, "build_config": vars(asked)}}
json.dump(config, open(os.path.join(asked.output_dir, "config.json"), "w"))
"""
DOCKER = """\
import json, os, subprocess, sys
open({record!r}, "a").write(json.dumps(sys.argv[1:]) + "\\n")
words = sys.argv[1:]
inside = words[words.index({image!r}) + 1:]
env = os.environ | {{"PATH": {inside_bin!r} + os.pathsep + os.environ["PATH"]}}
sys.exit(subprocess.run(inside, env=env).returncode)
"""


def _program(folder: Path, name: str, source: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{source}")
    path.chmod(0o755)


def driver(folder: Path, cards: list[tuple[str, str, int]], version: str = "590.44.01") -> None:
    """An nvidia-smi that knows of ``cards``, (name, compute capability, MiB), what it is asked for; half is free."""
    table = [
        {"name": name, "compute_cap": cap, "memory.total": mib, "memory.free": mib // 2, "driver_version": version}
        for name, cap, mib in cards
    ]
    source = (
        "import sys\n"
        "asked = next(a for a in sys.argv if a.startswith('--query-gpu=')).split('=')[1].split(',')\n"
        f"for card in {table!r}:\n    print(', '.join(str(card[name]) for name in asked))"
    )
    _program(folder, "nvidia-smi", source)


def builder(
    folder: Path,
    *,
    version: str = "1.2.1",
    lost: int = 0,
    fails: bool = False,
    hidden: tuple[str, ...] = (),
    extra: tuple[str, ...] = (),
) -> None:
    """A trtllm-build. lost: rank files it does not write; hidden and extra: flags its --help leaves out or adds."""
    fakes = str(Path(__file__).resolve().parent)
    source = BUILDER.format(fakes=fakes, version=version, lost=lost, fails=fails, hidden=hidden, extra=extra)
    _program(folder, "trtllm-build", source)


def docker(folder: Path, image: str, inside_bin: Path, record: Path) -> None:
    """A docker whose only image is ``image``, with the programs of ``inside_bin`` in it."""
    _program(folder, "docker", DOCKER.format(image=image, inside_bin=str(inside_bin), record=str(record)))


def triton(folder: Path, python: str) -> Path:
    """NVIDIA's /opt/tritonserver as far as a start looks at it: a server, two backends, a stub for ``python``."""
    _program(folder / "bin", "tritonserver", "raise SystemExit(0)\n")
    for backend, library in (("python", "libtriton_python.so"), ("tensorrtllm", "libtriton_tensorrtllm.so")):
        (folder / "backends" / backend).mkdir(parents=True)
        (folder / "backends" / backend / library).write_bytes(b"")
    stub = folder / "backends" / "python" / "triton_python_backend_stub"
    stub.write_bytes(b"\x7fELF\0libpython%b.so.1.0\0" % python.encode())
    return folder


def verified(recipe: Recipe, reason: str | None = None) -> None:
    """What verify leaves of a checkpoint within its budget, or, with a ``reason``, of one accepted beyond it."""
    verdict = {"passed": reason is None, "override": reason, "problems": [] if reason is None else ["KL is 3 nats"]}
    path = layout.evaluation(recipe.name)
    path.write_text(json.dumps({"verdict": verdict} | evaluation.scored(recipe)))


def checkpoint(folder: Path, ranks: int) -> None:
    """What quantise leaves, empty."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"mapping": {"world_size": ranks}}))
    for rank in range(ranks):
        (folder / f"rank{rank}.safetensors").write_bytes(b"")
