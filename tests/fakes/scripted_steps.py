"""An engine's target whose steps are as long as a step model says."""

import asyncio
import time

from contract.generation import Timings
from contract.step_model import StepModel
from tests.fakes.manifests import manifest


def small(slots: int = 8, step: int = 256, longest: int = 1024, cache: int | None = 8192, drafts: int = 0):
    recipe = {"speculative_decoding": {"max_draft_len": drafts}} if drafts else {}
    sizes = {"max_batch_size": slots, "max_num_tokens": step, "max_seq_len": longest, "kv_cache_tokens": cache}
    return manifest(recipe=recipe, **sizes)


class Words:
    def text(self, rng, tokens, prefix=""):
        return " ".join([str(rng.random())] * tokens)


class Scripted:
    """Answers at once, with the instants that an engine of the model would have."""

    def __init__(self, model: StepModel) -> None:
        self.model, self.requests = model, []

    async def send(self, request, record):
        words = len(request.prompt.split())
        self.requests.append(request)
        if request.max_tokens > 900:  # a background stream: its answer goes on for ever
            record.messages.append((time.monotonic(), 1))
            await asyncio.sleep(3600)
        step_s = self.model.seconds(self.running, self.running * words, 0)
        record.input_tokens = words
        prefill_s = self.model.prompt_s(words, 10_000)
        record.messages = [(10.0 + step_s * n, 1) for n in range(request.max_tokens)]
        record.timings = Timings(0, 1_000_000_000, 1_000_000_000 + round(prefill_s * 1e9), 0)
        record.finish_reason = "length"

    running = 1
