"""The pipeline, read from config files."""

import shutil
from pathlib import Path

import pytest

from contract.errors import NotFound
from server.repository import Model, read_pipeline, served_model
from server.settings import ROOT

FIXTURE = Path(__file__).parent / "fixtures" / "model_repository"


def test_steps_are_in_order_with_their_stubs_and_streams():
    assert read_pipeline(FIXTURE, "demo").models == (
        Model("tokenizer", stubs=2, streams=False),
        Model("engine", stubs=1, streams=True),
        Model("detokenizer", stubs=1, streams=True),
    )


def test_the_model_repository_is_a_pipeline():
    pipeline = read_pipeline(ROOT / "model_repository", "demo")
    assert pipeline.names == ("ensemble", "ensemble_packed")
    assert [model.name for model in pipeline.models] == ["tokenizer", "engine", "detokenizer", "client_watch"]
    assert [model.streams for model in pipeline.models] == [False, True, True, True]
    assert pipeline.last == ("detokenizer", "client_watch") and pipeline["engine"].stubs == 1


def test_an_encoder_is_served_by_itself():
    assert [served_model(kind) for kind in ("cpu", "embedding", "rerank")] == ["ensemble", "encoder", "encoder"]
    pipeline = read_pipeline(ROOT / "model_repository", "minilm", "encoder")
    assert pipeline.name == "encoder" and pipeline.models == (Model("encoder", stubs=1, streams=False),)


def test_a_named_config_replaces_the_default_one(tmp_path):
    for model in ("tokenizer", "engine", "detokenizer", "ensemble"):
        (tmp_path / model).mkdir()
        (tmp_path / model / "config.pbtxt").write_text((FIXTURE / model / "config.pbtxt").read_text())
    (tmp_path / "engine" / "configs").mkdir()
    compiled = 'name: "engine" backend: "tensorrtllm" model_transaction_policy { decoupled: true }'
    (tmp_path / "engine" / "configs" / "h100.pbtxt").write_text(compiled)
    assert read_pipeline(tmp_path, "h100")["engine"] == Model("engine", stubs=0, streams=True)
    assert read_pipeline(tmp_path, "demo")["engine"] == Model("engine", stubs=1, streams=True)


def test_around_an_engine_that_sends_bare_ids_there_is_a_packed_ensemble_where_it_has_that_variant(tmp_path):
    shutil.copytree(ROOT / "model_repository", tmp_path, dirs_exist_ok=True)
    for model in ("ensemble", "detokenizer"):
        (tmp_path / model / "configs").mkdir()
        shutil.copy(ROOT / "build" / "trtllm" / f"{model}.pbtxt", tmp_path / model / "configs" / "h100.pbtxt")
    assert read_pipeline(tmp_path, "h100").names == ("ensemble",)  # built before there was one
    assert read_pipeline(tmp_path, "demo").last == ("detokenizer", "client_watch")
    for model in ("ensemble_packed", "detokenizer_packed"):
        (tmp_path / model / "configs").mkdir()
        shutil.copy(ROOT / "build" / "trtllm" / f"{model}.pbtxt", tmp_path / model / "configs" / "h100.pbtxt")
    assert read_pipeline(tmp_path, "h100").last == ("detokenizer", "detokenizer_packed")


def test_a_missing_model_and_a_broken_config_are_named(tmp_path):
    with pytest.raises(NotFound, match="model 'ensemble' is not in .*config.pbtxt"):
        read_pipeline(tmp_path, "demo")
    (tmp_path / "ensemble").mkdir()
    (tmp_path / "ensemble" / "config.pbtxt").write_text("nonsense: 1")
    with pytest.raises(NotFound, match="model 'ensemble' cannot be read: .*config.pbtxt:1:1"):
        read_pipeline(tmp_path, "demo")
    (tmp_path / "ensemble" / "config.pbtxt").write_text('name: "ensemble"')
    with pytest.raises(NotFound, match="must be an ensemble"):
        read_pipeline(tmp_path, "demo")
