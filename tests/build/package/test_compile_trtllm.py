"""Compile on machines in miniature: what it refuses, what it runs, and what it checks of the result."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import gpu_machine
import pytest
from gpu_recipes import LLAMA_70B, make

from build.base import layout, option_table
from build.base import shape as shapes
from build.package import container
from build.package.compile_trtllm import WrongMachine, check_engine, compile_trtllm, option_differences
from build.recipe import commands
from build.recipe.recipe import Recipe
from build.recipe.schema import IMAGE
from contract.errors import EngineFailed

H100 = [("NVIDIA H100 80GB HBM3", "9.0", 81559)]


@pytest.fixture
def bare(tmp_path, monkeypatch) -> Path:
    """A machine with a shell, Python and nothing else; its programs' folder. Engines go to tmp_path/engines."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "bash").symlink_to(shutil.which("bash"))
    monkeypatch.setattr(layout, "ENGINES", tmp_path / "engines")
    monkeypatch.setattr(commands, "IMAGE_PATH", str(tmp_path / "image-bin"))
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    return folder


@pytest.fixture
def ready(bare) -> Path:
    """The same inside the image, with an H100 and the checkpoint of ``make()`` in place."""
    gpu_machine.driver(bare, H100)
    gpu_machine.builder(bare)
    gpu_machine.checkpoint(layout.checkpoint("engine-under-test"), 1)
    return bare


def compile_(recipe: Recipe) -> Path:
    return compile_trtllm(recipe, shapes.find(recipe.model))


def log_of(recipe: Recipe) -> str:
    return (layout.logs(recipe.name) / "compile.log").read_text()


def test_without_a_gpu_it_says_in_one_sentence_what_to_run_where(bare):
    with pytest.raises(WrongMachine) as caught:
        compile_(make(model=LLAMA_70B, tp=4))
    said = str(caught.value)
    assert "this machine has none" in said and "\n" not in said
    assert "run `make build-engine ENGINE=engine-under-test` on a machine with 4 x h100 (SM 90)" in said
    assert f"inside {IMAGE} or with docker or enroot" in said and "engine-under-test there to go on from here" in said
    assert not layout.ENGINES.exists()


def test_another_gpu_than_the_recipes_is_refused(bare):
    gpu_machine.driver(bare, [("NVIDIA A100-SXM4-80GB", "8.0", 81920)])
    with pytest.raises(WrongMachine, match=r"only on the SM it was built on, and this machine has .*A100.* \(SM 80\)"):
        compile_(make())


def test_a_machine_without_any_container_is_refused(bare):
    gpu_machine.driver(bare, H100)
    with pytest.raises(WrongMachine, match="neither trtllm-build nor docker nor enroot"):
        compile_(make())


def test_without_a_checkpoint_it_says_how_to_make_one(bare):
    gpu_machine.driver(bare, H100)
    gpu_machine.builder(bare)
    with pytest.raises(WrongMachine, match="is not there: make it first with `python3 /app/examples/quantization"):
        compile_(make())


def test_a_checkpoint_of_other_ranks_is_refused(ready):
    with pytest.raises(WrongMachine, match=r"has 1 rank files instead of 2 \(R33\)"):
        compile_(make(tp=2))


def test_inside_the_image_it_compiles_and_keeps_the_log(ready, capsys):
    recipe = make(environment={"NCCL_DEBUG": "INFO"})
    folder = compile_(recipe)
    assert folder == layout.compiled(recipe.name)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "rank0.engine"]
    built = json.loads((folder / "config.json").read_text())["build_config"]
    assert (built["max_batch_size"], built["logits_dtype"]) == (64, "float32")
    printed = capsys.readouterr().out
    line = commands.line(commands.compile_engine(recipe, shapes.find(recipe.model)))
    assert f"$ {line}" in printed and f"$ {line}" in log_of(recipe)
    assert "NCCL_DEBUG = INFO" in printed and "NCCL_DEBUG = INFO" in log_of(recipe)


def test_warnings_that_would_be_errors_are_kept_out_of_the_build(ready, monkeypatch):
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    compile_(make())
    assert "PYTHONWARNINGS = None" in log_of(make())


def test_every_rank_is_built(ready):
    recipe = make("four", model=LLAMA_70B, tp=4)
    gpu_machine.checkpoint(layout.checkpoint("four"), 4)
    assert len(list(compile_(recipe).glob("rank*.engine"))) == 4


def test_docker_runs_the_same_command_in_the_recipes_image(bare, tmp_path):
    gpu_machine.driver(bare, H100)
    record = tmp_path / "docker.jsonl"
    gpu_machine.builder(tmp_path / "image")
    gpu_machine.docker(bare, IMAGE, tmp_path / "image", record)
    recipe = make()
    gpu_machine.checkpoint(layout.checkpoint(recipe.name), 1)
    assert (compile_(recipe) / "rank0.engine").is_file()
    asked = [json.loads(row) for row in record.read_text().splitlines()]
    assert [words[-1] for words in asked] == ["--help", "1"]
    argv = commands.compile_engine(recipe, shapes.find(recipe.model))
    assert asked[1] == commands.in_docker(argv, recipe)[1:]


def test_a_failed_build_says_where_its_output_is(ready):
    gpu_machine.builder(ready, fails=True)
    with pytest.raises(EngineFailed, match="ended with status 7; its output is in .*compile.log"):
        compile_(make())
    assert "out of memory" in log_of(make())


def test_an_image_without_a_flag_of_the_plan_is_refused_before_the_build(ready):
    gpu_machine.builder(ready, hidden=("--use_fp8_context_fmha",))
    with pytest.raises(EngineFailed, match="has no --use_fp8_context_fmha"):
        compile_(make())
    assert not layout.compiled("engine-under-test").exists()


def test_other_differences_of_the_image_are_noted(ready):
    gpu_machine.builder(ready, hidden=("--streamingllm",), extra=("--new_plugin",))
    compile_(make())
    assert "options only in our table: ['--streamingllm']; only in the image: ['--new_plugin']" in log_of(make())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"version": "1.1.0"}, "of TensorRT-LLM 1.1.0, the recipe's image serves 1.2.1"),
        ({"lost": 1}, "has 0 rank engines instead of 1"),
    ],
)
def test_an_engine_that_is_not_the_one_asked_for_is_refused(ready, changes, problem):
    gpu_machine.builder(ready, **changes)
    with pytest.raises(EngineFailed, match=problem):
        compile_(make())


def test_an_engine_of_other_limits_is_refused(ready):
    compile_(make())
    with pytest.raises(EngineFailed, match="max_batch_size 64, the recipe has 8"):
        check_engine(make(max_batch_size=8))


def test_a_broken_engine_folder_is_refused(bare):
    folder = layout.compiled("engine-under-test")
    with pytest.raises(EngineFailed, match="holds no compiled engine: run `make build-engine"):
        check_engine(make())
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    with pytest.raises(EngineFailed, match="no readable engine config.json"):
        check_engine(make())


def test_enroot_imports_the_image_once(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "ROOT", tmp_path)
    first = container.entered(["true"], make(), container.ENROOT)
    assert [line[1] for line in first] == ["import", "start"]
    image = commands.enroot_image(make())
    image.parent.mkdir()
    image.write_bytes(b"")
    assert [line[1] for line in container.entered(["true"], make(), container.ENROOT)] == ["start"]


def test_flags_are_read_from_a_help_text():
    table = option_table.read("trtllm_build")
    flags = " ".join(option.flag for option in table.options.values())
    assert option_differences(f"usage: trtllm-build [-h] {flags} --help", table) == (set(), set())
    missing, added = option_differences(f"{flags.replace('--workers', '')} --brand_new", table)
    assert (missing, added) == ({"--workers"}, {"--brand_new"})


@pytest.mark.slow
def test_a_program_ends_with_a_driver_that_is_killed(tmp_path):
    note = tmp_path / "pid"
    child = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    code = (
        "import sys; from build.package import container; from tests.fakes import gpu_recipes; import pathlib; "
        f"container.run([sys.executable, '-c', {child!r}], gpu_recipes.make(), pathlib.Path({str(tmp_path / 'log')!r}))"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], cwd=layout.ROOT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (note.exists() and note.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    stat = Path(f"/proc/{note.read_text()}/stat")
    driver.kill()
    driver.wait()
    while stat.exists() and stat.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not stat.exists() or stat.read_text().split()[2] == "Z"
