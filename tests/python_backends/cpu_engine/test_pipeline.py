import dataclasses

import numpy as np
import openvino as ov
import pytest

from contract import manifest as manifests
from contract.generation import SamplingParams
from python_backends.cpu_engine.pipeline import open_pipeline
from python_backends.cpu_engine.worker import generation_config


def steps_to_first_token(engine_dir, manifest, prompt):
    pipeline = open_pipeline(engine_dir, manifest)
    config = generation_config(5, SamplingParams(top_k=1), frozenset())
    handle = pipeline.add_request(0, ov.Tensor(np.array([prompt], np.int64)), config)
    steps = 0
    while not handle.can_read():
        pipeline.step()
        steps += 1
    return steps


@pytest.fixture
def manifest(tiny_engine):
    return manifests.load(tiny_engine)


@pytest.mark.slow
def test_a_long_prompt_is_read_in_pieces_of_max_num_tokens(tiny_engine, manifest):
    assert manifest.max_num_tokens == 64
    assert steps_to_first_token(tiny_engine, manifest, range(200)) == 4


def test_without_chunked_context_a_prompt_is_read_in_one_step_or_not_at_all(tiny_engine, manifest):
    whole = dataclasses.replace(manifest, recipe=manifest.recipe | {"chunked_context": False})
    assert steps_to_first_token(tiny_engine, whole, range(60)) == 1
    with pytest.raises(RuntimeError):
        steps_to_first_token(tiny_engine, whole, range(200))
