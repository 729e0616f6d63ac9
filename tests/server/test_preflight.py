"""One error before any model loads, for every mismatch of engine and machine."""

import json
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from contract.errors import EngineFailed, Unavailable
from contract.manifest import EngineManifest, sha256_file
from server import machine, preflight
from server.machine import Gpu, Machine
from tests.fakes import manifests

GIB = 1024**3
IMAGE = "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"
H100 = Gpu("NVIDIA H100 80GB HBM3", 90, 80 * GIB, 78 * GIB)
GPU = Machine((H100, H100), driver="590.44.01", tensorrt="10.14.1", tensorrt_llm="1.2.1", cuda="13.1")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    shape = {"num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "openvino_model.bin").write_bytes(b"0" * 1024)
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "rank0.engine").write_bytes(b"0" * 4096)
    return tmp_path


def manifest(folder, **changes) -> EngineManifest:
    digest = sha256_file(folder / "tokenizer.json")
    fields = {
        "name": "mine",
        "model": "m",
        "recipe": {"tp": 1, "pp": 1},
        "tokenizer_sha256": digest,
        "kv_cache_precision": "f16",
    }
    return manifests.manifest(**fields | changes)


def gpu_manifest(folder, **changes) -> EngineManifest:
    versions = {"tensorrt_llm": "1.2.1", "tensorrt": "10.14.1.48", "driver": "590.44.01"}
    gpu = {"kind": "trtllm", "sm": 90, "image": IMAGE, "versions": versions, "kv_cache_precision": "auto"}
    return manifest(folder, **(gpu | changes))


def check_cpu(folder, made, installed=None, available=64 * GIB):
    installed = installed or {"openvino": "2026.4.1-1", "openvino-genai": "2026.4.1.0"}
    with (
        patch.object(preflight, "free_memory_bytes", lambda: available),
        patch.multiple(machine, inspect=not_called, package=installed.get),
    ):
        preflight.check(made, folder)


def not_called() -> Machine:
    raise AssertionError("a CPU engine needs no GPU")


def check_gpu(folder, made, here=GPU, package={"tensorrt_llm": "1.2.1"}.get):
    with patch.multiple(machine, inspect=lambda: here, package=package):
        preflight.check(made, folder)


def problem(check, *arguments) -> str:
    with pytest.raises(Unavailable) as caught:
        check(*arguments)
    message = str(caught.value)
    assert message.startswith("engine mine cannot be served here: ") and "\n" not in message
    return message


def test_an_engine_that_fits_the_machine_passes(folder):
    check_cpu(folder, manifest(folder))
    check_gpu(folder, gpu_manifest(folder))
    check_gpu(folder, gpu_manifest(folder), replace(GPU, driver="610.1"))
    check_gpu(folder, gpu_manifest(folder, recipe={"tp": 2, "pp": 1}))


@pytest.mark.parametrize("kind", ["embedding", "rerank"])
def test_an_encoder_needs_openvino_and_memory_and_has_no_kv_cache(folder, kind):
    versions = {"openvino": "2026.4.1-1"}
    made = manifest(folder, kind=kind, kv_cache_tokens=None, versions=versions, memory_bytes=9 * GIB)
    check_cpu(folder, made, versions)
    message = problem(check_cpu, folder, made, versions, 8 * GIB)
    assert "weights and activations take 9.0 GiB" in message and "lower max_num_tokens" in message


@pytest.mark.parametrize("kind", ["cpu", "trtllm"])
def test_another_tokenizer_is_refused(folder, kind):
    made = manifest(folder) if kind == "cpu" else gpu_manifest(folder)
    (folder / "tokenizer.json").write_text("{ }")
    with pytest.raises(EngineFailed, match="must be the tokenizer that the model was built with.*make build-engine"):
        preflight.check(made, folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(EngineFailed, match="must be the tokenizer"):
        preflight.check(made, folder)


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        (
            {"openvino": "2027.1", "openvino-genai": "2026.4.1.0"},
            "built and verified with openvino 2026.4.1-1, and 2027",
        ),
        ({"openvino": "2026.4.1-1", "openvino-genai": "2025.1"}, "openvino-genai 2026.4.1.0, and 2025.1 is installed"),
        ({"openvino": "2026.4.1-1"}, "openvino-genai is not installed; `make setup` installs it"),
    ],
)
def test_another_openvino_is_named(folder, installed, expected):
    assert expected in problem(check_cpu, folder, manifest(folder), installed)


def test_a_pool_that_does_not_fit_is_named_with_its_size(folder):
    # 2 x 8 layers x 2 KV heads x 64 x 2 bytes = 4 KiB a token
    message = problem(check_cpu, folder, manifest(folder, kv_cache_tokens=4 * 1024**2), None, 8 * GIB)
    assert "4194304 tokens of KV cache take 16.3 GiB, and 8.0 GiB of memory are free" in message


@pytest.mark.parametrize(
    ("limit", "used", "start"),
    [
        ("memory.max", "memory.current", ""),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_"),
    ],
    ids=["v2", "v1"],
)
def test_a_containers_limit_counts_less_what_it_uses_beside_cached_files(
    folder, tmp_path, monkeypatch, limit, used, start
):
    free, group = SimpleNamespace(available=64 * GIB), tmp_path / "cgroup"
    monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: free)
    monkeypatch.setattr(preflight, "CGROUP", group)
    assert preflight.free_memory_bytes() == 64 * GIB  # no container
    (group / "memory").mkdir(parents=True)
    (group / used).write_text(f"{6 * GIB}\n")
    cached = f"anon {4 * GIB}\n{start}inactive_file {GIB}\n{start}active_file {GIB}\n"
    (group / limit).with_name("memory.stat").write_text(cached)
    (group / limit).write_text("max\n")
    assert preflight.free_memory_bytes() == 64 * GIB
    (group / limit).write_text(f"{8 * GIB}\n")
    with pytest.raises(Unavailable, match=r"take 5\.0 GiB, and 4\.0 GiB of memory are free"):
        preflight.check(manifest(folder, memory_bytes=5 * GIB, versions={}), folder)
    free.available = GIB
    assert preflight.free_memory_bytes() == GIB


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"gpus": ()}, "needs 1 GPU(s) of SM 90, and the driver of this machine lists none"),
        (
            {"gpus": (replace(H100, name="NVIDIA L40S", sm=89),)},
            "built for SM 90, and this machine has NVIDIA L40S (SM",
        ),
        ({"driver": "570.86.15"}, "the driver here is 570.86.15, older than 590.44.01"),
        ({"tensorrt_llm": None}, "TensorRT-LLM is not installed here"),
        ({"tensorrt_llm": "1.1.0"}, "an engine of TensorRT-LLM 1.2.1, which no other version loads, and 1.1.0 is"),
        ({"tensorrt": "10.13.3"}, "compiled by TensorRT 10.14.1.48, which no other version loads, and 10.13.3 is"),
        ({"tensorrt": None}, "compiled by TensorRT 10.14.1.48, which no other version loads, and there is none here"),
        ({"gpus": (replace(H100, free_bytes=1024),)}, "NVIDIA H100 80GB HBM3 has 0.0 GiB free of 80.0"),
    ],
)
def test_a_gpu_machine_that_differs_is_named_with_the_image_to_use(folder, changes, expected):
    message = problem(check_gpu, folder, gpu_manifest(folder), replace(GPU, **changes))
    assert expected in message and message.endswith(f"; serve it in {IMAGE} on 1 x SM 90")


def test_a_gpu_must_hold_weights_workspace_and_kv_pool_together(folder):
    # 4 KiB of KV cache a token; 0.8 GiB are the CUDA context and libraries
    made = gpu_manifest(folder, kv_cache_tokens=4 * 1024**2)
    message = problem(check_gpu, folder, made, replace(GPU, gpus=(replace(H100, free_bytes=16 * GIB),)))
    assert "it takes 16.8 GiB of each GPU (0.0 weights, 0.8 workspace, 16.0 for 4194304 tokens of KV cache)" in message
    check_gpu(folder, made, replace(GPU, gpus=(replace(H100, free_bytes=17 * GIB),)))
    split = replace(made, recipe={"tp": 2, "pp": 1})
    check_gpu(folder, split, replace(GPU, gpus=(replace(H100, free_bytes=9 * GIB),) * 2))


def test_an_engine_that_sizes_its_pool_needs_room_for_one_sequence(folder):
    made = gpu_manifest(folder, kv_cache_tokens=None, max_seq_len=1024**2)
    message = problem(check_gpu, folder, made, replace(GPU, gpus=(replace(H100, free_bytes=4 * GIB),)))
    assert "4.0 for 1048576 tokens of KV cache" in message


def test_each_rank_needs_a_gpu(folder):
    message = problem(check_gpu, folder, gpu_manifest(folder, recipe={"tp": 4, "pp": 1}))
    assert "split over 4 GPUs of SM 90, and this machine has 2" in message and message.endswith("on 4 x SM 90")


def test_an_llm_api_engine_accepts_newer_versions_and_needs_no_tensorrt(folder):
    made = gpu_manifest(folder, kind="llmapi", versions={"tensorrt_llm": "1.2.1"})
    check_gpu(folder, made, replace(GPU, tensorrt=None, tensorrt_llm="1.3.0rc22"))
    message = problem(check_gpu, folder, made, replace(GPU, tensorrt_llm="1.1.0"))
    assert "TensorRT-LLM here is 1.1.0, older than the 1.2.1 it was made for" in message


def test_an_llm_api_engine_needs_tensorrt_llm_in_the_python_that_runs_it(folder):
    made = gpu_manifest(folder, kind="llmapi", versions={"tensorrt_llm": "1.2.1"})
    message = problem(check_gpu, folder, made, GPU, {}.get)
    assert "has no TensorRT-LLM; run the server with the image's own /opt/venv-tritonserver/bin/python3" in message
    check_gpu(folder, gpu_manifest(folder), GPU, {}.get)
