"""The LLM behind the engine's scheduler, streams and metrics, on the stand-in for the LLM API."""

import queue
from dataclasses import replace
from functools import partial
from pathlib import Path

import llm_api
import numpy as np
import pytest

from contract.generation import Guide, SamplingParams
from contract.manifest import Adapter, EngineManifest
from python_backends.adapters import AdapterIds
from python_backends.ensemble.token_increment import StreamEvent
from python_backends.ensemble.worker_messages import AddSequence, EndSequence
from python_backends.llmapi_engine import generation
from python_backends.llmapi_engine.link import LlmLink
from tests.fakes import manifests

WAIT_S = 60


class Listener:
    def __init__(self) -> None:
        self.said: queue.Queue = queue.Queue()

    def on_ready(self) -> None:
        self.said.put("ready")

    def on_report(self, report) -> None:
        self.said.put(report)

    def on_death(self, reason: str) -> None:
        self.said.put(f"dead: {reason}")

    def next(self):
        return self.said.get(timeout=WAIT_S)

    def until_end_of(self, *ids: int) -> dict[int, list]:
        """Outputs by sequence until each of ``ids`` has ended."""
        outputs: dict[int, list] = {id: [] for id in ids}
        while not all(seen and seen[-1].event.last for seen in outputs.values()):
            for output in self.next().outputs:
                outputs[output.id].append(output)
        return outputs


def manifest(**changes) -> EngineManifest:
    recipe = {"tp": 2, "pp": 1, "prefix_reuse": True, "chunked_context": False, "kv_cache_fraction": 0.8}
    fields = {"name": "mine", "kind": "llmapi", "recipe": recipe, "precision": "fp8", "kv_cache_precision": "fp8"}
    return manifests.manifest(**fields | {"kv_cache_tokens": None, "versions": {}} | changes)


@pytest.fixture
def api(monkeypatch):
    return llm_api.install(monkeypatch)


@pytest.fixture
def listener():
    return Listener()


@pytest.fixture
def link(api, listener):
    opened = LlmLink(lambda: generation.open_llm(Path("/engines/mine"), manifest()), listener)
    assert listener.next() == "ready"
    yield opened
    opened.close()


def add(id: int, *, ids=(5, 6), max_tokens=4, stop_ids=(), **sampling) -> AddSequence:
    return AddSequence(id, np.array(ids, dtype=np.int64), max_tokens, SamplingParams(**sampling), frozenset(stop_ids))


def test_every_id_comes_once_and_the_last_says_how_it_ended(link, listener):
    link.send(add(1, max_tokens=4))
    link.send(add(2, max_tokens=9, stop_ids=(3,)))
    outputs = listener.until_end_of(1, 2)
    assert [id for output in outputs[1] for id in output.token_ids] == [1, 2, 3, 4]
    assert outputs[1][-1].event is StreamEvent.LENGTH
    assert [id for output in outputs[2] for id in output.token_ids] == [1, 2, 3]  # the stop id stays, as on the CPU
    assert outputs[2][-1].event is StreamEvent.STOP
    assert all(output.event is StreamEvent.RUNNING for seen in outputs.values() for output in seen[:-1])


def test_an_ended_sequence_is_aborted_and_confirmed_as_cancelled(api, listener):
    api.paused = True
    link = LlmLink(lambda: generation.open_llm(Path("/engines/mine"), manifest()), listener)
    assert listener.next() == "ready"
    link.send(add(7, max_tokens=100))
    link.send(EndSequence(7))
    link.send(EndSequence(8))  # long gone
    outputs = listener.until_end_of(7)
    assert outputs[7][-1].event is StreamEvent.CANCELLED
    link.close()


def test_one_requests_fault_is_its_own(link, listener):
    link.send(add(1, ids=(13,)))
    link.send(add(2))
    outputs = listener.until_end_of(1, 2)
    assert (outputs[1][0].event, outputs[1][0].error) == (StreamEvent.ERROR, "the executor refuses 13")
    assert outputs[2][-1].event is StreamEvent.LENGTH


def test_log_probabilities_are_of_the_chosen_id_and_the_likeliest(link, listener):
    link.send(add(1, max_tokens=2, top_log_probs=2, log_probs=True))
    link.send(add(2, max_tokens=2, log_probs=True))
    link.send(add(3, max_tokens=2))
    outputs = listener.until_end_of(1, 2, 3)
    top = [entry for output in outputs[1] for entry in output.top_log_probs]
    assert [(list(entry.ids), list(entry.log_probs)) for entry in top] == [
        ([1, 101], [-0.5, -1.5]),
        ([2, 102], [-0.5, -1.5]),
    ]
    assert [p for output in outputs[2] for p in output.log_probs] == [-0.5, -0.5]
    assert not any(output.top_log_probs for output in outputs[2]) and not any(output.log_probs for output in outputs[3])


def test_the_load_is_reported(link, listener):
    link.send(add(1, ids=(5, 6, 7), max_tokens=3))
    report = listener.next()
    assert report.scheduled == 1 and report.start_ns <= report.end_ns
    assert (report.context, report.context_tokens) == (0, 0)


def test_an_llm_that_does_not_load_is_a_death_with_its_reason(api, listener):
    api.fails_to_load = "CUDA out of memory"
    LlmLink(lambda: generation.open_llm(Path("/engines/mine"), manifest()), listener)
    assert listener.next() == "dead: the LLM failed: CUDA out of memory"


def test_closing_aborts_what_runs_and_lets_go_of_the_gpus(api, listener):
    api.paused = True
    link = LlmLink(lambda: generation.open_llm(Path("/engines/mine"), manifest()), listener)
    listener.next()
    link.send(add(1, max_tokens=100))
    link.close()
    assert api.opened[0].is_shut_down
    link.send(add(2))  # too late, and quiet


def test_the_llm_is_opened_as_the_manifest_says(link, api):
    arguments = api.opened[0].arguments
    assert arguments["model"] == "/engines/mine/checkpoint" and arguments["skip_tokenizer_init"] is True
    assert (arguments["tensor_parallel_size"], arguments["max_batch_size"], arguments["max_seq_len"]) == (2, 8, 1024)
    assert arguments["enable_chunked_prefill"] is False
    kv_cache = arguments["kv_cache_config"]
    assert kv_cache == llm_api.KvCacheConfig(True, None, 0.8, "fp8")


def test_sampling_is_told_in_the_apis_words(link, listener, api):
    link.send(add(1, stop_ids=(9, 4), temperature=0.7, top_p=0.9, top_k=5, seed=3, min_tokens=2))
    link.send(add(2, temperature=0.0))
    listener.until_end_of(1, 2)
    sampled, greedy = api.opened[0].asked
    assert (sampled.temperature, sampled.top_p, sampled.top_k, sampled.seed) == (0.7, 0.9, 5, 3)
    assert (sampled.stop_token_ids, sampled.end_id, sampled.min_tokens) == ([4, 9], -1, 2)
    assert sampled.include_stop_str_in_output and not sampled.detokenize
    assert (greedy.top_k, greedy.temperature, greedy.stop_token_ids) == (1, None, None)


def test_a_priority_is_passed_to_an_api_that_has_them(link, listener, api):
    link.send(replace(add(1), priority=0.9))
    listener.until_end_of(1)  # 1.2 has none, and is not asked for one
    newer = llm_api.LLM13("m")
    for priority in (0.5, 0.9):
        generation.generate(newer, replace(add(2), priority=priority))
    assert newer.priorities == [0.5, 0.9]


def test_an_engine_with_a_vocabulary_has_grammars(api, listener, tmp_path):
    (tmp_path / "xgrammar_tokenizer_info.json").write_text("{}")
    link = LlmLink(lambda: generation.open_llm(tmp_path, manifest()), listener)
    listener.next()
    tag = '{"type": "structural_tag"}'
    for id, guide in enumerate([Guide("ebnf_grammar", "root ::= [0-9]"), Guide("structural_tag", tag), None], 1):
        link.send(replace(add(id), guide=guide))
    listener.until_end_of(1, 2, 3)
    link.close()
    arguments, asked = api.opened[0].arguments, [sampling.guided_decoding for sampling in api.opened[0].asked]
    assert (arguments["tokenizer"], arguments["guided_decoding_backend"]) == (str(tmp_path), "xgrammar")
    assert arguments["skip_tokenizer_init"] is False
    grammar, tagged = (
        llm_api.GuidedDecodingParams(grammar="root ::= [0-9]"),
        llm_api.GuidedDecodingParams(structural_tag=tag),
    )
    assert asked == [grammar, tagged, None]


def test_an_adapter_is_named_with_its_folder_and_the_prompt_is_as_it_was_sent(api, listener, tmp_path):
    two = tuple(Adapter(name, "0" * 64, rank) for name, rank in (("poet", 8), ("lawyer", 16)))
    adapted = manifest(adapters=two, properties={"lora_target_modules": "attn_q attn_k attn_v"}, vocab_size=100)
    for number in (1, 2):
        (tmp_path / "adapters" / str(number)).mkdir(parents=True)
    ids = AdapterIds.from_manifest(adapted)
    named = partial(generation.named_adapter, tmp_path, ids)
    link = LlmLink(lambda: generation.open_llm(tmp_path, adapted), listener, named)
    assert listener.next() == "ready"
    for key, number in enumerate((2, 0, 1)):
        link.send(add(key, ids=ids.mark(np.array([5, 6]), number).tolist()))
    outputs = listener.until_end_of(0, 1, 2)
    assert [seen[-1].event for seen in outputs.values()] == [StreamEvent.LENGTH] * 3
    (llm,) = api.opened
    expected = llm_api.LoraConfig(
        max_lora_rank=16, lora_target_modules=["attn_q", "attn_k", "attn_v"], max_loras=2, max_cpu_loras=2
    )
    assert llm.arguments["enable_lora"] and llm.arguments["lora_config"] == expected
    folder = tmp_path / "adapters"
    named = [
        llm_api.LoRARequest("lawyer", 2, str(folder / "2")),
        None,
        llm_api.LoRARequest("poet", 1, str(folder / "1")),
    ]
    assert llm.lora_requests == named and llm.prompts == [[5, 6]] * 3
    link.close()
