"""What several test packages share: the server's Python types, model configurations and a tiny engine."""

from __future__ import annotations

import gc
import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

# Tests of all packages share a process. gRPC, which reads this when it is imported, else restarts its threads in every
# fork, and where they find their files closed they abort the child before it becomes the program that was to be run.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# Tests see neither the settings of the machine nor those that make exports for what it serves, such as the model that
# `make demo` has built.
for _name in [name for name in os.environ if name.startswith("TRIDENT_")]:
    if _name not in ("TRIDENT_ENGINES_DIR", "TRIDENT_TRITONSERVER"):
        del os.environ[_name]

import numpy as np
import pytest
import triton_python_backend_utils as triton_stub
from google.protobuf import text_format
from hypothesis import HealthCheck, settings
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig

from python_backends import heartbeat
from tests.fakes import checkpoints

ROOT = Path(__file__).resolve().parents[1]

# Machines that run several things at once are slow now and then; how slow says nothing about the code. The examples are
# few and the same at every run: what holds here holds elsewhere. `make search`, a part of .ci/run, draws others and
# more of them (--hypothesis-profile=search).
_ANY_PACE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "database": None}
settings.register_profile("search", max_examples=200, **_ANY_PACE)
settings.register_profile("trident", max_examples=10, derandomize=True, **_ANY_PACE)
settings.load_profile("trident")


# Models run in the tests' own process too, which must not end itself because the machine was paused within a call.
heartbeat._GIVEN_UP_S = math.inf

# Programs under test get the signals that a shell leaves them: under nohup, or in the background of a script, these are
# ignored, and whatever is started inherits that. Workers of xdist ignore Ctrl-C because their parent sees to it.
if "PYTEST_XDIST_WORKER" not in os.environ:
    for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(_number) is signal.SIG_IGN:
            signal.signal(_number, _usual)


# Of the slow files those that take longest, the longest first: a worker with one of them left would end alone.
_LONGEST = """
end_to_end/test_faults end_to_end/test_hangs end_to_end/test_ensemble server/test_supervisor end_to_end/test_streams
end_to_end/test_soak end_to_end/test_benchmarks end_to_end/test_real_model build/test_engine
end_to_end/test_structured_output end_to_end/test_registration gateway/test_workers end_to_end/test_continuation
build/recipe/test_choice build/quality/test_evaluation gateway/test_openapi
""".split()
_TURN = {f"tests/{name}.py": turn for turn, name in enumerate(_LONGEST)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers of xdist take the files in this order."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: _TURN.get(item.nodeid.partition("::")[0], len(_TURN)))


def pytest_collection_finish() -> None:
    """Keeps modules and tests, which live until the end, out of the garbage collections of the tests, and these rare:
    full ones, which walk through all that tests keep, such as the parsed sources, were a twentieth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(1000, 10, 100)


@pytest.fixture(scope="session", autouse=True)
def triton_types() -> ModuleType:
    """The stub's module, complete from here on, as in the server once the model is imported. Test modules are imported
    before, so a model that touches the server's types while it is imported fails."""
    triton_stub.appear()
    return triton_stub


@pytest.fixture
def triton(triton_types: ModuleType) -> Iterator[ModuleType]:
    """The stub's module with empty metrics, log and models."""
    triton_types.forget()
    yield triton_types
    triton_types.forget()


@pytest.fixture(scope="session")
def model_config() -> Callable[[str], ModelConfig]:
    """The model configuration of a folder of model_repository, as the server reads it."""

    def read(model: str) -> ModelConfig:
        path = ROOT / "model_repository" / model / "config.pbtxt"
        return text_format.Parse(path.read_text(), ModelConfig())

    return read


@pytest.fixture(scope="session")
def answer_of(model_config: Callable[[str], ModelConfig]) -> Callable[[str, object], dict[str, np.ndarray]]:
    """``answer_of(model, response)``: a response's tensors by name, once each of them was found to be as the model's
    configuration declares it, where the server would refuse or corrupt others."""

    def tensors(model: str, response: object) -> dict[str, np.ndarray]:
        assert not response.has_error(), response.error().message()
        config = model_config(model)
        declared = {output.name: output for output in config.output}
        arrays = {}
        for tensor in response.output_tensors():
            name, array = tensor.name(), tensor.as_numpy()
            assert name in declared, f"{model} has no output {name}"
            datatype = model_config_pb2.DataType.Name(declared[name].data_type).removeprefix("TYPE_")
            assert tensor.triton_dtype() == ("BYTES" if datatype == "STRING" else datatype), name
            dims = list(declared[name].dims)
            assert array.ndim == 1 + len(dims) and array.shape[0] == 1, f"{name} is {array.shape}, batch and {dims}"
            assert all(want in (-1, got) for want, got in zip(dims, array.shape[1:], strict=True)), name
            arrays[name] = array
        return arrays

    return tensors


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a CPU engine made from a random two-layer Llama by build/: f32, 8 sequences, 256 tokens each, a KV
    cache of 32 blocks. Byte-level tokenizer: ids below 256 are bytes (in the alphabet's order), 256 ends a text."""
    from build import engine
    from build.recipe import recipe

    home = tmp_path_factory.mktemp("engines")
    checkpoints.write(home / "checkpoint", checkpoints.CONFIGS["llama_gqa"])
    table = {
        "kind": "cpu",
        "description": "for tests",
        "model": str(home / "checkpoint"),
        "precision": "fp32",
        "kv_cache_precision": "f32",
        "max_batch_size": 8,
        "max_num_tokens": 64,
        "max_seq_len": 256,
        "kv_cache_tokens": 1024,
    }
    return engine.build(recipe.parse(table, Path("tiny.toml")), home, lambda line: None)
