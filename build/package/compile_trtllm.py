"""Compile: a TensorRT-LLM checkpoint becomes an engine, by trtllm-build in the recipe's image on the recipe's GPU.

Where it cannot work it stops with one sentence that says what to run where, and leaves nothing behind.
"""

import json
import os
import re
import subprocess
from pathlib import Path

from build.base import hardware, layout, option_table
from build.base.shape import Shape
from build.package import container
from build.recipe import commands
from build.recipe.recipe import Recipe
from build.recipe.schema import TRTLLM_VERSION
from contract.errors import EngineFailed, Unavailable

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9_]*")


class WrongMachine(Unavailable):
    """This machine cannot compile the engine; the message says which one can."""


def compile_trtllm(recipe: Recipe, shape: Shape) -> Path:
    """The compiled engine's folder. Raises WrongMachine without a GPU, container or checkpoint; EngineFailed."""
    runtime = check_machine(recipe)
    check_checkpoint(recipe, shape)
    argv = commands.compile_engine(recipe, shape)
    check_options(argv, recipe, runtime)
    log = layout.logs(recipe.name) / "compile.log"
    for line in container.entered(argv, recipe, runtime):
        if (status := container.run(line, recipe, log)) != 0:
            raise EngineFailed(f"{line[0]} ended with status {status}; its output is in {layout.relative(log)}")
    return check_engine(recipe)


def check_machine(recipe: Recipe) -> str:
    """The container runtime to use; raises WrongMachine with the one thing that is missing and where it is not."""
    again = build_it(recipe)
    if not (cards := hardware.present()):
        raise WrongMachine(f"trtllm-build needs a GPU (R30) and this machine has none: {again}")
    if all(sm != recipe.sm for _, sm in cards):
        here = ", ".join(sorted({f"{name} (SM {sm})" for name, sm in cards}))
        raise WrongMachine(f"an engine runs only on the SM it was built on, and this machine has {here}: {again}")
    if (runtime := container.runtime()) is None:
        raise WrongMachine(f"neither trtllm-build nor docker nor enroot is on this machine: {again}")
    if "error" in os.environ.get("PYTHONWARNINGS", "") and runtime == container.INSIDE:
        print("PYTHONWARNINGS=error is left out of the build's environment (R35)", flush=True)
    return runtime


def build_it(recipe: Recipe) -> str:
    """What to run where. What is finished stays finished, so a machine that gets this folder too goes on from here."""
    expected = f"{recipe.world_size} x {recipe.gpu} (SM {recipe.sm})"
    run, made = f"make build-engine ENGINE={recipe.name}", layout.relative(layout.ENGINES / recipe.name)
    where = f"on a machine with {expected}, inside {recipe.image} or with docker or enroot to run it"
    return f"run `{run}` {where}, and copy {made} there to go on from here"


def check_checkpoint(recipe: Recipe, shape: Shape) -> None:
    """Raises WrongMachine unless the checkpoint of every rank is there."""
    folder = layout.checkpoint(recipe.name)
    ranks = len(list(folder.glob("rank*.safetensors"))) if (folder / "config.json").is_file() else 0
    if ranks == recipe.world_size:
        return
    make = commands.line(commands.checkpoint(recipe, shape))
    there = f"has {ranks} rank files instead of {recipe.world_size} (R33)" if ranks else "is not there"
    first = f"make it first with `{make}` in {recipe.image}"
    raise WrongMachine(f"the checkpoint {layout.relative(folder)} {there}: {first}")


def check_options(argv: list[str], recipe: Recipe, runtime: str) -> None:
    """Holds the image's own --help against our option table, which was not read from this very image. Raises
    EngineFailed when an option of ``argv`` is not there; other differences are written to the log."""
    log = layout.logs(recipe.name) / "compile.log"
    lines = container.entered([argv[0], "--help"], recipe, runtime)
    try:
        for line in lines[:-1]:
            container.run(line, recipe, log)
        text = container.output(lines[-1], recipe)
    except (OSError, subprocess.SubprocessError) as exc:
        raise EngineFailed(f"`{commands.line(lines[-1])}` does not run: {exc}") from exc
    missing, added = option_differences(text, option_table.read("trtllm_build"))
    if used := ", ".join(sorted(missing & {part for part in argv if part.startswith("--")})):
        raise EngineFailed(f"trtllm-build of {recipe.image} has no {used}; use the image the recipe was made for")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"options only in our table: {sorted(missing)}; only in the image: {sorted(added)}\n")


def option_differences(help_text: str, table: option_table.OptionTable) -> tuple[set[str], set[str]]:
    """(flags only in our table, flags only in ``help_text``)."""
    known = {option.flag for option in table.options.values()}
    there = set(FLAG.findall(help_text)) - {"--help"}
    return known - there, there - known


def check_engine(recipe: Recipe) -> Path:
    """The engine's folder if what trtllm-build left matches the recipe; raises EngineFailed if not."""
    folder = layout.compiled(recipe.name)
    if not (folder / "config.json").is_file():
        raise EngineFailed(f"{layout.relative(folder)} holds no compiled engine: {build_it(recipe)}")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        version, built = str(config["version"]), config["build_config"]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise EngineFailed(f"{layout.relative(folder)} holds no readable engine config.json: {exc!r}") from exc
    ranks = len(list(folder.glob("rank*.engine")))
    if ranks != recipe.world_size:
        raise EngineFailed(f"{layout.relative(folder)} has {ranks} rank engines instead of {recipe.world_size}")
    if version != TRTLLM_VERSION:
        raise EngineFailed(f"the engine is of TensorRT-LLM {version}, the recipe's image serves {TRTLLM_VERSION}")
    for key, expected in (("max_batch_size", recipe.max_batch_size), ("max_beam_width", recipe.max_beam_width)):
        if built.get(key) != expected:
            raise EngineFailed(f"the engine was built with {key} {built.get(key)}, the recipe has {expected}")
    return folder
