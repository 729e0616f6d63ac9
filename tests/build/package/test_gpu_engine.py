"""The stages of a GPU engine: what runs, what is not run again, where it stops, and what is served in the end."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import gpu_machine
import numpy as np
import pytest

from build.base import layout
from build.base.checkpoint import open_checkpoint
from build.lint import __main__, repository
from build.package import container, gpu_engine
from build.package.compile_trtllm import WrongMachine
from build.quantise import environment
from build.recipe import commands, schema, verdict
from build.recipe import recipe as recipes
from contract.errors import EngineFailed, InvalidArgument, NotFound, Unavailable
from contract.manifest import load, verify
from tests.fakes import adapters, checkpoints

pytestmark = pytest.mark.slow

H100 = [("NVIDIA H100 80GB HBM3", "9.0", 81559)]
CONFIG = checkpoints.CONFIGS["llama_gqa"] | {"max_position_embeddings": 4096}
TABLE = {
    "kind": "trtllm",
    "precision": "fp8",
    "kv_cache_precision": "fp8",
    "gpu": "h100",
    "max_batch_size": 8,
    "max_num_tokens": 512,
    "max_seq_len": 512,
    "calibration": {"dataset": "cpython"},
}


class Programs:
    """Stands for the programs of the stages before compile: notes what is run and leaves the files they leave."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.fail = ""
        self.said = ""

    def run(self, argv, recipe, log: Path, real=container.run) -> int:
        name = next((n for n in ("quantize", "evaluation") if any(word.endswith(f".{n}") for word in argv)), "")
        if not name:
            self.ran.append("compile")
            return real(argv, recipe, log)
        self.ran.append(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            file.write(f"$ {commands.line(argv)}\n{self.said}\n")
        if self.fail == name:
            return 1
        if name == "quantize":
            shutil.rmtree(layout.checkpoint(recipe.name), ignore_errors=True)
            gpu_machine.checkpoint(layout.checkpoint(recipe.name), recipe.world_size)
        else:
            reason = argv[argv.index("--accept-quality") + 1] if "--accept-quality" in argv else None
            gpu_machine.verified(recipe, reason)
        return 0


@pytest.fixture
def programs(monkeypatch) -> Programs:
    stand_in = Programs()
    monkeypatch.setattr(container, "run", stand_in.run)
    return stand_in


@pytest.fixture
def bare(tmp_path, monkeypatch, programs) -> Path:
    """A machine without a GPU whose programs lie in the returned folder; engines and models in tmp_path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "bash").symlink_to(shutil.which("bash"))
    (folder / "python3").symlink_to(sys.executable)
    monkeypatch.setattr(layout, "ENGINES", tmp_path / "engines")
    shutil.copytree(layout.MODEL_REPOSITORY, tmp_path / "model_repository")
    monkeypatch.setattr(layout, "MODEL_REPOSITORY", tmp_path / "model_repository")
    monkeypatch.setattr(commands, "IMAGE_PATH", str(tmp_path / "image-bin"))
    monkeypatch.setattr(environment, "build_python", lambda: Path("/build/python"))
    monkeypatch.setenv("PATH", str(folder))
    checkpoints.write(tmp_path / "model", CONFIG)
    return folder


@pytest.fixture
def gpu(bare) -> Path:
    gpu_machine.driver(bare, H100)
    gpu_machine.builder(bare)
    return bare


def recipe(bare: Path, **changes: object) -> recipes.Recipe:
    return recipes.parse(TABLE | {"model": str(bare.parent / "model")} | changes, Path("tiny.toml"))


def build(made: recipes.Recipe, accept: str | None = None) -> list[str]:
    lines: list[str] = []
    assert gpu_engine.build(made, lines.append, accept) == layout.ENGINES / made.name
    return lines


def test_without_a_gpu_compile_stops_and_what_was_finished_stays(bare, programs):
    with pytest.raises(WrongMachine, match="this machine has none: run `make build-engine ENGINE=tiny` on a"):
        build(recipe(bare))
    assert programs.ran == ["quantize", "evaluation"]
    with pytest.raises(WrongMachine):
        build(recipe(bare))
    assert programs.ran == ["quantize", "evaluation"]
    with pytest.raises(Exception, match="is half-built"):
        load(layout.ENGINES / "tiny")


def test_the_gpu_machine_goes_on_from_there_and_the_result_can_be_served(bare, programs):
    with pytest.raises(WrongMachine):
        build(recipe(bare))
    gpu_machine.driver(bare, H100)
    gpu_machine.builder(bare)
    lines = build(recipe(bare))
    assert programs.ran == ["quantize", "evaluation", "compile"]
    assert lines[-1].endswith("tiny is ready (fp8 from " + str(bare.parent / "model") + ")")
    manifest = verify(layout.ENGINES / "tiny")
    assert (manifest.kind, manifest.sm, manifest.image) == ("trtllm", 90, schema.IMAGE)
    assert manifest.versions["tensorrt_llm"] == "1.2.1" and manifest.versions["driver"] == "590.44.01"
    assert {"tokenizer.json", "engine/config.json", "engine/rank0.engine"} <= manifest.files.keys()
    assert manifest.evaluation["verdict"] == {"passed": True, "override": None, "problems": []}
    for step in ("ensemble", "detokenizer"):
        written = layout.MODEL_REPOSITORY / step / "configs" / "tiny.pbtxt"
        assert written.read_text() == (layout.OPTION_TABLES / f"{step}.pbtxt").read_text()
    assert [f for f in __main__.lint(repository.read(layout.MODEL_REPOSITORY, "tiny")) if f.severity == "error"] == []


def test_a_second_build_runs_nothing(gpu, programs):
    build(recipe(gpu))
    programs.ran.clear()
    assert "is up to date" in build(recipe(gpu))[-1] and programs.ran == []
    verify(layout.ENGINES / "tiny")


@pytest.mark.parametrize(
    ("damaged", "again"),
    [
        ("checkpoint/rank0.safetensors", ["quantize"]),
        ("evaluation.json", ["evaluation"]),
        ("engine/rank0.engine", ["compile"]),
        ("tokenizer.json", []),
        ("manifest.json", []),
    ],
)
def test_a_damaged_file_is_noticed_and_its_stage_runs_again(gpu, programs, damaged, again):
    build(recipe(gpu))
    whole = verify(layout.ENGINES / "tiny").files
    programs.ran.clear()
    (layout.ENGINES / "tiny" / damaged).write_bytes(b"damaged")
    build(recipe(gpu))
    assert programs.ran == again and verify(layout.ENGINES / "tiny").files == whole


@pytest.mark.parametrize(
    ("changes", "again"),
    [
        (
            {"precision": "int4_awq", "kv_cache_precision": "auto", "group_size": 32},
            ["quantize", "evaluation", "compile"],
        ),
        ({"max_batch_size": 4}, ["compile"]),
        ({"quality": {"kl": 0.5}}, ["evaluation"]),
        ({"chunked_context": False}, []),
        ({"environment": {"NCCL_DEBUG": "INFO"}}, ["quantize", "evaluation", "compile"]),
    ],
)
def test_a_change_runs_the_stages_it_concerns(gpu, programs, changes, again):
    build(recipe(gpu))
    programs.ran.clear()
    build(recipe(gpu, **changes))
    assert programs.ran == again
    assert load(layout.ENGINES / "tiny").recipe["chunked_context"] is changes.get("chunked_context", True)


def test_changed_weights_run_everything(gpu, programs):
    build(recipe(gpu))
    programs.ran.clear()
    checkpoints.write_weights(gpu.parent / "model", checkpoints.tensors(CONFIG, seed=5))
    build(recipe(gpu))
    assert programs.ran == ["quantize", "evaluation", "compile"]


def test_a_stage_that_fails_says_its_own_last_sentence_and_is_tried_again(gpu, programs):
    programs.fail, programs.said = "evaluation", "error: engine tiny is not packaged: KL divergence is 3 nats"
    with pytest.raises(EngineFailed, match="verify failed with status 1: engine tiny is not packaged: KL .*verify.log"):
        build(recipe(gpu))
    assert not (layout.ENGINES / "tiny" / "engine").exists()
    programs.fail = ""
    programs.ran.clear()
    build(recipe(gpu), accept="the demo needs it")
    assert programs.ran == ["evaluation", "compile"]
    assert load(layout.ENGINES / "tiny").evaluation["verdict"]["override"] == "the demo needs it"
    assert "$ " in (layout.logs("tiny") / "verify.log").read_text()


def test_a_refused_recipe_runs_nothing(gpu, programs):
    with pytest.raises(verdict.Refused, match="tiny is refused by R4: .*nearest recipe that works"):
        build(recipe(gpu, gpu="b200", precision="int4_awq", kv_cache_precision="auto"))
    assert programs.ran == []


def test_what_only_the_image_can_quantise_says_so(bare, programs):
    with pytest.raises(Unavailable, match="quantise needs a GPU of SM 90 and the image .* has no option calib_tp_size"):
        build(recipe(bare, calibration={"dataset": "cnn_dailymail"}, quantize={"calib_tp_size": 2}))
    assert programs.ran == []


def test_the_llm_api_needs_no_compiler(bare, programs):
    made = recipe(bare, kind="llmapi")
    build(made)
    assert programs.ran == ["quantize", "evaluation"]
    manifest = verify(layout.ENGINES / "tiny")
    assert manifest.kind == "llmapi" and "checkpoint/rank0.safetensors" in manifest.files
    assert not (layout.MODEL_REPOSITORY / "ensemble" / "configs").exists()


def test_adapters_are_served_with_the_engine_and_only_wider_ones_compile_it_again(gpu, programs):
    values = {name: np.array(tensor.f32()) for name, tensor in open_checkpoint(gpu.parent / "model").tensors.items()}
    adapters.write(gpu.parent / "poet", values, rank=4)
    made = recipe(gpu, adapters=[{"name": "poet", "path": str(gpu.parent / "poet")}])
    build(made)
    folder = layout.ENGINES / "tiny"
    manifest = verify(folder)
    assert [(one.name, one.rank) for one in manifest.adapters] == [("poet", 4)]
    files = {f"adapters/1/model.lora_{part}.npy" for part in ("config", "weights")}
    assert files <= manifest.files.keys()
    compiled = (folder / "logs" / "compile.log").read_text()
    assert "--lora_plugin auto" in compiled and "--max_lora_rank 4" in compiled
    for seed, rank, again in ((1, 4, []), (1, 8, ["compile"])):
        programs.ran.clear()
        adapters.write(gpu.parent / "poet", values, rank=rank, seed=seed)
        build(made)
        assert [name for name in programs.ran if name == "compile"][:1] == again
        assert load(folder).adapters[0].rank == rank
        assert load(folder).files != manifest.files


def test_no_engine_is_no_folder(bare):
    with pytest.raises(NotFound):
        load(layout.ENGINES / "tiny")


def test_a_dry_run_is_the_plan_and_does_nothing():
    line = [sys.executable, "-m", "build.engine", "--engine", "llama-3.1-8b-fp8-hopper", "--dry-run"]
    done = subprocess.run(line, cwd=layout.ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("llama-3.1-8b-fp8-hopper: ") and "trtllm-build" in done.stdout
    assert not os.path.exists(layout.ENGINES / "llama-3.1-8b-fp8-hopper")


def test_what_the_image_and_docker_say_around_the_machines_answer_is_left_out():
    said = '== Triton ==\n\n{"driver": "590.44.01"}\nWARNING: memory limit 2\n7\n'
    assert gpu_engine._answer(said) == '{"driver": "590.44.01"}'
    with pytest.raises(EngineFailed, match="printed no JSON, but: 'WARNING"):
        gpu_engine._answer("WARNING: no driver\n")


def test_what_verify_cannot_measure_needs_a_reason_before_anything_runs(gpu, programs):
    made = recipe(gpu, pp=2, calibration={"dataset": "cnn_dailymail"})
    for reason in (None, " "):
        with pytest.raises(InvalidArgument, match="accept_quality: must be a reason .* a recipe with pp 2 .*Q4"):
            build(made, reason)
    assert programs.ran == []


HEADS = [
    ({"mode": "eagle", "max_draft_len": 4}, "EagleForCausalLM"),
    ({"mode": "medusa", "max_draft_len": 4}, "MedusaForCausalLM"),
    ({"mode": "explicit_draft_tokens", "max_draft_len": 4}, "ReDrafterForLLaMALM"),
]


@pytest.mark.parametrize(("spec", "architecture"), HEADS)
def test_a_checkpoint_with_draft_heads_is_taken_as_it_was_put_in_place(gpu, programs, spec, architecture):
    plain = {"precision": "bf16", "kv_cache_precision": "auto", "calibration": None}
    plain_recipe = {key: value for key, value in (TABLE | plain).items() if value is not None}
    plain_recipe |= {"model": str(gpu.parent / "model")}
    made = recipes.parse(plain_recipe | {"speculative_decoding": spec}, Path("tiny.toml"))
    placed = layout.checkpoint("tiny")
    with pytest.raises(Unavailable, match=f"architecture must begin with '{architecture[:5]}.*got no file: .*U2"):
        build(made, "the heads are NVIDIA's")
    gpu_machine.checkpoint(placed, 1)
    (placed / "config.json").write_text(json.dumps({"architecture": architecture, "mapping": {"world_size": 1}}))
    (placed / "rank0.safetensors").write_bytes(b"heads")
    build(made, "the heads are NVIDIA's")
    assert programs.ran == ["evaluation", "compile"]
    assert (placed / "rank0.safetensors").read_bytes() == b"heads"
    assert load(layout.ENGINES / "tiny").evaluation["verdict"]["override"] == "the heads are NVIDIA's"
    assert "is up to date" in build(made)[-1]
    with pytest.raises(EngineFailed, match=f"is a checkpoint of {architecture}, which .*: move it away"):
        build(recipes.parse(plain_recipe, Path("tiny.toml")))
    assert (placed / "rank0.safetensors").read_bytes() == b"heads"


def test_another_modelopt_quantises_again(gpu, programs, monkeypatch):
    build(recipe(gpu))
    programs.ran.clear()
    monkeypatch.setattr(commands, "modelopt", lambda: "nvidia-modelopt==0.38.0")
    build(recipe(gpu))
    assert programs.ran == ["quantize", "evaluation", "compile"]


def test_every_source_that_decides_what_a_stage_leaves_is_in_its_key(sources_imported):
    outside = {
        # Paths, hashes, processes, and readers of files that no GPU engine is made from.
        *(f"base/{name}.py" for name in ("digest", "encoder_checkpoint", "gguf_file", "json_fields", "layout")),
        "base/program.py",
    }
    read_back = {  # to check what was written, and the model, which transformers reads; they change nothing in it
        *(f"base/{name}.py" for name in ("checkpoint", "numerics", "shards")),
        *(f"quantise/{name}.py" for name in ("hf_quantised", "quantised_linear", "trtllm_checkpoint")),
        "model/decoder.py",
    }
    quantise = sources_imported(["quantise/quantize.py"])
    assert quantise == set(gpu_engine.SOURCES["quantise"]) | outside | read_back
    planned = {  # the recipe and what is planned from it: of those, the stage's command and budget are in its key
        *(
            f"base/{name}.py"
            for name in ("gguf_folder", "gguf_tokenizer", "hardware", "option_table", "shape", "wheel")
        ),
        *(f"recipe/{name}.py" for name in ("commands", "provenance", "quantization", "recipe", "schema")),
        *(f"model/{name}.py" for name in ("lora_adapter", "openvino_engine")),  # of CPU engines
    }
    verify_imports = sources_imported(["quality/evaluation.py"])
    assert verify_imports == set(gpu_engine.SOURCES["verify"]) | outside | planned
