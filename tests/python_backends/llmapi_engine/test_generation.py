"""The LLM API's arguments and outputs. What it answers to them is in test_link.py."""

import json
from pathlib import Path

import pytest

from contract.manifest import EngineManifest
from python_backends.llmapi_engine import generation
from tests.fakes import manifests

ROOT = Path(__file__).resolve().parents[3]
EQUIVALENTS = json.loads((ROOT / "build" / "trtllm" / "llmapi_equivalents.json").read_text())


def manifest(**changes) -> EngineManifest:
    recipe = {"tp": 2, "pp": 1, "prefix_reuse": True, "chunked_context": False, "kv_cache_fraction": 0.8}
    fields = {"name": "mine", "kind": "llmapi", "recipe": recipe, "precision": "fp8", "kv_cache_precision": "fp8"}
    return manifests.manifest(**fields | {"kv_cache_tokens": None, "versions": {}} | changes)


def test_nothing_is_asked_for_that_went_away_with_the_engines():
    gone = EQUIVALENTS["TrtLlmArgs_extra_over_BaseLlmArgs"].keys()
    assert not gone & generation.llm_arguments(Path("e"), manifest()).keys()
    assert "FP8" in EQUIVALENTS["KV_CACHE_QUANT_ALGO"]


def test_formats_have_the_names_of_the_apis_table():
    from build.quantise import quantised_linear
    from build.recipe import commands  # of build/, which writes what the LLM API loads

    table = dict(EQUIVALENTS["qformat_to_quant_algo"])
    assert {"bf16": table.pop("full_prec")} | table == commands.QUANT_ALGO
    assert set(quantised_linear.QUANT_ALGOS) - {None} <= set(EQUIVALENTS["QuantAlgo"])
    assert set(quantised_linear.KV_CACHE_QUANT_ALGOS) - {None} <= set(EQUIVALENTS["KV_CACHE_QUANT_ALGO"])


@pytest.mark.parametrize(
    ("stats", "used"), [({"kvCacheStats": {"maxNumBlocks": 8, "usedNumBlocks": 2}}, 0.25), ({}, 0.0)]
)
def test_cache_usage_is_a_fraction(stats, used):
    assert generation.cache_usage(stats) == used
