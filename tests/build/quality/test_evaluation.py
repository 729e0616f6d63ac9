"""The verify stage: a good engine passes, a damaged one is not published, and what was accepted is on record."""

import json
import math
import platform
from pathlib import Path

import numpy as np
import pytest

from build import engine
from build.base import layout
from build.base.checkpoint import open_checkpoint
from build.package import compile_cpu
from build.quality import comparison, evaluation
from build.recipe import recipe as recipes
from contract.errors import InvalidArgument
from contract.manifest import load
from tests.fakes import checkpoints, gpu_machine, gpu_recipes

pytestmark = pytest.mark.slow

TABLE = {
    "kind": "cpu",
    "precision": "bf16",
    "max_batch_size": 8,
    "max_num_tokens": 64,
    "max_seq_len": 256,
    "kv_cache_tokens": 2048,
}


@pytest.fixture(autouse=True)
def less_text(monkeypatch):
    monkeypatch.setattr(evaluation, "MOST_BLOCKS", 2)


def recipe(**changes: object) -> recipes.Recipe:
    return recipes.parse(TABLE | {"model": "build/demo_model/checkpoint"} | changes, Path("tiny.toml"))


@pytest.fixture
def random_checkpoint(tmp_path):
    checkpoints.write(tmp_path / "checkpoint", checkpoints.CONFIGS["llama_gqa"])
    return tmp_path / "checkpoint"


@pytest.fixture
def damage(monkeypatch):
    """From now on the compiler shifts a tenth of the weights by one: the file is whole and the model is not."""

    def compiled(checkpoint, made, folder, notify, real=compile_cpu.compile_cpu):
        real(checkpoint, made, folder, notify)
        path = folder / "openvino_model.bin"
        data = np.fromfile(path, dtype=np.uint16)
        middle = slice(len(data) // 2, len(data) // 2 + len(data) // 10)
        data[middle] = np.roll(data[middle], 1)
        data.tofile(path)

    return lambda: monkeypatch.setattr(compile_cpu, "compile_cpu", compiled)


def test_the_scores_of_a_good_engine_are_in_its_manifest(tmp_path):
    engine.build(recipe(), tmp_path, lambda line: None)
    scores = load(tmp_path / "tiny").evaluation
    assert scores["verdict"] == {"passed": True, "problems": [], "override": None}
    assert scores["quality"]["top1_agreement"] > 0.97 and scores["quality"]["tokens"] == 2 * 255
    python = platform.python_version()
    assert scores["text"] == {"dataset": "cpython", "sequences": 2, "tokens_per_sequence": 256, "python": python}
    shorter, longer = sorted((scores["sanity"]["reply"], scores["sanity"]["reference"]), key=len)
    assert shorter and longer.startswith(shorter)  # a slow machine cuts one of them at the time limit


def test_a_damaged_engine_is_not_published_and_the_one_that_was_there_stays(tmp_path, damage):
    engine.build(recipe(), tmp_path, lambda line: None)
    before = load(tmp_path / "tiny")
    damage()
    with pytest.raises(comparison.BeyondBudget, match="engine tiny is not packaged: .*KL divergence is"):
        engine.build(recipe(max_batch_size=4), tmp_path, lambda line: None)
    assert load(tmp_path / "tiny") == before and not list(tmp_path.glob("tiny.partial-*"))


def test_a_damaged_engine_of_random_weights_is_noticed_too(tmp_path, random_checkpoint, damage):
    made = recipe(model=str(random_checkpoint), precision="int4")
    engine.build(made, tmp_path / "engines", lambda line: None)
    found = load(tmp_path / "engines" / "tiny").evaluation
    assert found["verdict"]["passed"] and "hardly better than chance" in found["notes"][0]
    damage()
    with pytest.raises(comparison.BeyondBudget):
        engine.build(recipe(model=str(random_checkpoint)), tmp_path / "engines", lambda line: None)


def test_random_weights_that_guess_a_little_better_than_chance_are_noise_too(random_checkpoint):
    arch = open_checkpoint(random_checkpoint).architecture
    assert evaluation.is_noise(0.92 * arch.vocab_size, arch) and evaluation.is_noise(1.1 * arch.vocab_size, arch)
    assert not evaluation.is_noise(0.2 * arch.vocab_size, arch)


def test_random_weights_may_be_wrong_by_any_number_of_nats():
    scores = comparison.Quality(510, math.inf, math.inf, 3.0, 0.9, 0.5, 1.0, 0, 30.0)
    budget = evaluation.noise_budget(scores)
    assert comparison.judge(scores, budget).passed and budget.kl == 12.0
    json.dumps(comparison.record(scores, budget, comparison.judge(scores, budget)), allow_nan=False)
    near_chance = comparison.Quality(510, 250.0, 750.0, 3.0, 0.9, 0.001, 0.01, 0, 0.01)
    assert evaluation.noise_budget(near_chance).perplexity_ratio == 2.0
    assert not comparison.judge(near_chance, evaluation.noise_budget(near_chance)).passed


def test_an_engine_that_lost_all_that_nearly_uniform_random_weights_say_is_noticed(tmp_path):
    opened = []
    for name, sharpness in (("model", 0.2), ("damaged", 0.0)):
        folder, config = tmp_path / name, checkpoints.CONFIGS["llama_gqa"]
        checkpoints.write(folder, config)
        checkpoints.write_weights(folder, checkpoints.tensors(config, sharpness=sharpness))
        opened.append(open_checkpoint(folder))
    budget, said = recipes.DEFAULT_QUALITY["int4"], []
    model, damaged = (evaluation.reference(checkpoint, said.append) for checkpoint in opened)
    against = evaluation.ReferenceRun(opened[0], said.append)
    found = evaluation.evaluate("good", model, against, budget)
    assert found["quality"]["kl"] == 0 and 0 < found["quality"]["conviction"] < 0.2
    assert any("hardly better than chance" in line for line in said)
    with pytest.raises(comparison.BeyondBudget, match="KL divergence is"):
        evaluation.evaluate("damaged", damaged, against, budget)


def test_a_recipes_own_budget_holds_for_random_weights_too(tmp_path, random_checkpoint):
    made = recipe(model=str(random_checkpoint), precision="int4", quality={"kl": 0.01})
    with pytest.raises(comparison.BeyondBudget, match="KL divergence"):
        engine.build(made, tmp_path / "engines", lambda line: None)


def test_what_is_accepted_beyond_its_budget_says_why_in_its_manifest(tmp_path, damage):
    damage()
    engine.build(recipe(), tmp_path, lambda line: None, accept="to show what damage does")
    verdict = load(tmp_path / "tiny").evaluation["verdict"]
    assert not verdict["passed"] and verdict["problems"] and verdict["override"] == "to show what damage does"
    lines: list[str] = []
    engine.build(recipe(), tmp_path, lines.append)
    assert len(lines) == 1 and "up to date" in lines[0]


def test_an_empty_reason_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match="accept_quality: must be a reason"):
        engine.build(recipe(), tmp_path, lambda line: None, accept=" ")
    assert not (tmp_path / "tiny").exists()


def test_an_engine_that_was_never_measured_is_built_again(tmp_path):
    engine.build(recipe(), tmp_path, lambda line: None)
    path = tmp_path / "tiny" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"evaluation": None}))
    engine.build(recipe(), tmp_path, lambda line: None)
    assert load(tmp_path / "tiny").evaluation is not None


def test_larger_models_are_measured_on_less_text():
    arch = open_checkpoint(layout.ROOT / "build/demo_model/checkpoint").architecture
    assert evaluation.block_count(arch) == evaluation.MOST_BLOCKS
    assert evaluation.block_count(_large()) == evaluation.FEWEST_BLOCKS


def _large():
    from build.base import shape

    return shape.find("meta-llama/Llama-3.3-70B-Instruct").architecture


def test_a_long_reference_pass_says_how_far_it_is(random_checkpoint, monkeypatch):
    monkeypatch.setattr(evaluation, "PROGRESS_S", -1.0)
    lines: list[str] = []
    theirs = evaluation.reference(open_checkpoint(random_checkpoint), lines.append)
    list(theirs.logits(np.zeros((1, 4), dtype=np.int64)))
    assert lines == ["verify: reference, layer 1 of 2", "verify: reference, layer 2 of 2"]


def test_a_checkpoint_that_cannot_be_read_is_packaged_for_a_reason_with_its_quality_on_record_as_unmeasured(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(layout, "ENGINES", tmp_path)
    gpu_machine.checkpoint(layout.checkpoint("engine-under-test"), 2)
    made, said = gpu_recipes.make(pp=2), []
    with pytest.raises(InvalidArgument, match="accept_quality: must be a reason .* got none"):
        evaluation.evaluate_checkpoint(made, said.append)
    evaluation.evaluate_checkpoint(made, said.append, "measured by hand")
    scores = evaluation.accepted(made)
    assert scores["verdict"]["override"] == "measured by hand" and not scores["verdict"]["passed"]
    assert scores["verdict"]["problems"] == ["not measured: verify cannot read the checkpoint of a recipe with pp 2"]
    assert "quality" not in scores and "accepted because measured by hand" in said[0]
