"""The Triton model ``engine`` on the LLM API: the CPU engine's model with another worker behind it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from contract import manifest as manifests
from python_backends.adapters import AdapterIds
from python_backends.cpu_engine import model as cpu_engine
from python_backends.cpu_engine.link import Listener
from python_backends.llmapi_engine.generation import named_adapter, open_llm
from python_backends.llmapi_engine.link import LlmLink


class TritonPythonModel(cpu_engine.TritonPythonModel):
    load_timeout_s = 3600  # a 70B checkpoint from a slow disk, with the LLM's own warm-up

    def open_link(self, engine_dir: Path, listener: Listener) -> LlmLink:
        manifest = manifests.load(engine_dir)
        named = partial(named_adapter, engine_dir, AdapterIds.from_manifest(manifest))
        return LlmLink(lambda: open_llm(engine_dir, manifest), listener, named)
