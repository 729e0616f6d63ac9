"""How a command gets into the recipe's image: we are in it already, through docker, or through enroot."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from build.base import layout
from build.recipe import commands
from build.recipe.recipe import Recipe

INSIDE, DOCKER, ENROOT = "inside", "docker", "enroot"
OUTPUT_TIMEOUT_S = 300.0  # `trtllm-build --help` imports tensorrt_llm first
_PR_SET_PDEATHSIG = 1  # Linux: a signal when the parent dies


def runtime() -> str | None:
    """INSIDE where trtllm-build is here, else DOCKER or ENROOT where one is installed, else None."""
    path = search_path()
    if shutil.which("trtllm-build", path=path):
        return INSIDE
    return next((name for name in (DOCKER, ENROOT) if shutil.which(name, path=path)), None)


def search_path() -> str:
    """PATH with the folder where the image keeps its Python environment in front, as the commands in it need."""
    return os.pathsep.join((commands.IMAGE_PATH, os.environ.get("PATH", os.defpath)))


def entered(argv: Sequence[str], recipe: Recipe, name: str) -> list[list[str]]:
    """The command lines that run ``argv`` by way of runtime ``name``, in order."""
    if name == INSIDE:
        return [list(argv)]
    if name == DOCKER:
        return [commands.in_docker(argv, recipe)]
    first = [] if commands.enroot_image(recipe).exists() else [commands.enroot_import(recipe)]
    return [*first, commands.in_enroot(argv, recipe)]


def environment(recipe: Recipe) -> dict[str, str]:
    """The process environment of a build command: the recipe's additions, and no warnings turned into errors (R35)."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONWARNINGS"}
    return kept | {"PATH": search_path()} | dict(recipe.environment)


def run(argv: Sequence[str], recipe: Recipe, log: Path) -> int:
    """Runs a command in the repository root, echoed first, its output shown and kept in ``log``; its exit status."""
    log.parent.mkdir(parents=True, exist_ok=True)
    line = f"$ {commands.line(argv)}"
    print(line, flush=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
        with subprocess.Popen(
            list(argv),
            cwd=layout.ROOT,
            env=environment(recipe),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=_end_with_the_driver,
        ) as process:
            assert process.stdout is not None
            try:
                for text in process.stdout:
                    sys.stdout.write(text)
                    sys.stdout.flush()
                    file.write(text)
            except BaseException:  # Ctrl-C: the terminal sends it to the program too, kill only to the driver
                process.terminate()
                raise
    return process.returncode


def _end_with_the_driver() -> None:
    """A killed driver drops its lock; a program it left behind would then write beside the next build's."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def output(argv: Sequence[str], recipe: Recipe) -> str:
    """What a short command prints, its error output included; raises OSError or subprocess.SubprocessError."""
    where, env = layout.ROOT, environment(recipe)
    done = subprocess.run(
        list(argv), cwd=where, env=env, capture_output=True, text=True, timeout=OUTPUT_TIMEOUT_S, check=True
    )
    return done.stdout + done.stderr
