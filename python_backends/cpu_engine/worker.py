"""The engine process: OpenVINO GenAI's continuous-batching pipeline and its step loop.

``step()`` holds the interpreter lock, so the loop runs in a process of its own: the Triton-side model (link.py) starts
it, sends commands and receives one message per step with every sequence's new tokens. The process ends when its
connection does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
from collections import OrderedDict
from multiprocessing.connection import Connection
from pathlib import Path

if __name__ == "__main__":  # the converter of models, a seventh of all that is imported, which nothing here calls
    sys.modules["openvino.tools.ovc"] = None  # type: ignore[assignment]
import numpy as np
import openvino as ov
import openvino_genai as genai

from contract import failpoint, thread_dump
from contract import manifest as manifests
from contract.generation import Guide, SamplingParams
from contract.manifest import DRAFT, EngineManifest
from contract.scheduling import BLOCK_TOKENS, UNDRAFTED_FROM
from python_backends.cpu_engine.drafting import TIMED_STEPS, Drafting, timed_tokens
from python_backends.cpu_engine.prefix_cache import PartialBlocks
from python_backends.cpu_engine.step_budget import StepBudget, attended
from python_backends.cpu_engine.top_log_probs import ScoredSequence, TopLogProbsModel
from python_backends.ensemble.token_increment import StreamEvent
from python_backends.ensemble.worker_messages import AddSequence, Failed, Ready, StepOutput, StepReport, last_line
from python_backends.grammar.structured_output import structured_output
from python_backends.limits import EngineLimits

_NICE = 5
_PIECE_IDS = 2**62  # beyond those of all sequences
_TIMED_IDS = _PIECE_IDS - UNDRAFTED_FROM
_MOST_SCORED = 8  # sequences that the second model reads at once: each has a KV cache of its own beside the pipeline's
_IDLE_S = 0.1  # without a command, until steps are timed: clients that send the next request at once wait for none


class StepLoop:
    """Run the pipeline: drain commands, step, report."""

    def __init__(
        self,
        pipeline: genai.ContinuousBatchingPipeline,
        top_log_probs: TopLogProbsModel,
        connection: Connection,
        drafting: Drafting,
        partial_blocks: PartialBlocks,
        step_budget: StepBudget | None,
    ) -> None:
        """step_budget: None where prompts cannot be read in pieces: without a prefix cache or chunked prefill."""
        self._pipeline = pipeline
        self._top_log_probs = top_log_probs
        self._scored: dict[int, ScoredSequence] = {}
        self._connection = connection
        self._handles: dict[int, genai.GenerationHandle] = {}
        self._unscored: dict[int, AddSequence] = {}  # they start once their prompts are scored
        self._without_token: dict[int, AddSequence] = {}  # in the order in which they came
        self._log_probs = set[int]()  # sequences whose log probabilities were requested
        self._ended: list[StepOutput] = []  # what the next report begins with
        self._leaving: set[int] = set()  # they are cancelled once their prompts are read
        self._drafting = drafting
        self._partial_blocks = partial_blocks
        self._step_budget = step_budget
        self._prompts: OrderedDict[int, tuple[AddSequence, genai.GenerationConfig]] = OrderedDict()  # not started yet
        self._read_tokens: OrderedDict[int, int] = OrderedDict()  # of each of those, in the prefix cache
        self._awaited: dict[int, tuple[int, int]] = {}  # by each that waits: an earlier one, and what both have
        self._begun: dict[int, int] = {}  # of the next report
        self._piece: genai.GenerationHandle | None = None  # of the first prompt, in the next step
        self._pieces = 0
        self._prompt_tokens, self._attended = 0, 0.0  # that steps are to read (step_budget)
        self._scheduled = 0  # requests in the last step
        self._cache_usage = 0.0  # of the fuller pipeline

    def run(self) -> None:
        """Loop until the connection ends. Raises EOFError, ConnectionError: the connection has ended."""
        while True:
            self._drain_commands()
            start_ns = time.monotonic_ns()
            self._score_prompt()
            self._return_to_drafting()
            self._leave_drafting()
            self._start_prompts()
            self._advance(start_ns)
            if self._drafting.load is not None and not self._without_token:  # which loading would have delayed
                load, self._drafting.load = self._drafting.load, None
                threading.Thread(target=load).start()

    def _advance(self, start_ns: int) -> None:
        running = self._decoding()
        tokens, before = self._take_prompt_tokens(running)
        drafts, plain = len(self._drafting), self._plain()
        began_s = time.perf_counter()
        self._step(drafts=drafts > 0, plain=plain > 0)
        taken_s = time.perf_counter() - began_s
        if self._step_budget is not None and plain and not drafts:
            self._step_budget.observe(running, tokens, before, taken_s)
        if self._piece is None and bool(drafts) != bool(plain):
            self._drafting.timed(running, taken_s, drafts=drafts > 0)
        if self._piece is not None and self._piece.get_status() != genai.GenerationStatus.RUNNING:
            self._piece = None
            self._partial_blocks.end(_PIECE_IDS + self._pieces)
        self._report(start_ns)
        self._forget_prompt_tokens()
        for id in [id for id in self._leaving if not self._partial_blocks.starts(id)]:
            self._leaving.discard(id)
            self._end(id)

    def _take_prompt_tokens(self, running: int) -> tuple[int, float]:
        """Return the prompt tokens that the next step reads beside sequences, and what they attend to; the pipeline
        leaves those that it has no places for to the steps after it."""
        tokens, before, part = self._prompt_tokens, self._attended, 1.0
        if self._step_budget is not None and tokens > self._step_budget.most - running:
            part = max(0, self._step_budget.most - running) / tokens
        taken = round(part * tokens)
        self._prompt_tokens, self._attended = tokens - taken, (1 - part) * before
        return taken, part * before

    def _forget_prompt_tokens(self) -> None:
        """Forget tokens that no step reads: the prefix cache had them, or their prompts were refused."""
        if self._prompt_tokens and self._piece is None and not any(id in self._handles for id in self._without_token):
            self._prompt_tokens, self._attended = 0, 0.0

    def _plain(self) -> int:
        """Return the requests of the plain pipeline. One that drafting has admitted may have no handle yet."""
        return len(self._handles) - sum(id in self._handles for id in self._drafting) + (self._piece is not None)

    def _decoding(self) -> int:
        """Return the sequences whose prompts are read."""
        return sum(id not in self._without_token for id in self._handles)

    def _step(self, *, drafts: bool, plain: bool) -> None:
        """Step the pipelines that have sequences, or blocks of a cancelled one to free; read their gauges."""
        self._scheduled, self._cache_usage = 0, 0.0
        if failpoint.value("engine.step") is not None:
            raise RuntimeError("failpoint engine.step")
        for pipeline in filter(None, [self._drafting.pipeline] * drafts + [self._pipeline] * plain):
            pipeline.step()
            metrics = pipeline.get_metrics()
            self._scheduled += metrics.scheduled_requests
            self._cache_usage = max(self._cache_usage, metrics.cache_usage / 100)

    def _time_steps(self, sequences: int, drafts: bool) -> None:
        """Generate a few tokens of so many sequences, with or without drafts, to time their steps. A request ends it.
        Each step reads one prompt, of one block, so that a request waits for no longer step."""
        pipeline = (self._drafting.pipeline if drafts else None) or self._pipeline
        handles: dict[int, genai.GenerationHandle] = {}
        for nth in range(sequences + TIMED_STEPS):
            if nth and self._connection.poll(0):
                break
            began_s = time.process_time()
            if nth < sequences:
                ids = np.full(BLOCK_TOKENS, nth, np.int64)  # one whole block, as in open_drafting
                config = generation_config(timed_tokens(sequences, 0), SamplingParams(top_k=1), frozenset())
                if drafts:
                    self._drafting.set_timed(config, sequences, beside=nth)
                self._partial_blocks.add(_TIMED_IDS + nth, ids)
                handles[_TIMED_IDS + nth] = pipeline.add_request(_TIMED_IDS + nth, ov.Tensor(ids[None]), config)
            pipeline.step()
            if nth >= sequences:
                self._drafting.timed(sequences, time.process_time() - began_s, drafts=drafts, idle=True)
        for handle in handles.values():
            handle.cancel()
        pipeline.step()  # frees their blocks
        for id, handle in handles.items():
            while handle.can_read():
                for output in handle.read().values():
                    self._partial_blocks.generated(id, output.generated_ids)
            self._partial_blocks.end(id)

    def _drain_commands(self) -> None:
        came: list[AddSequence] = []
        # Blocks only when there is nothing to step: an idle engine uses no CPU.
        busy = self._handles, self._prompts, self._piece, self._unscored, self._ended, came
        while not any(busy) and not self._connection.poll(_IDLE_S if self._drafting.learns else None):
            if untimed := self._drafting.untimed:
                self._time_steps(*untimed)
        while self._connection.poll(0 if any(busy) else None):
            command = self._connection.recv()
            if not isinstance(command, AddSequence):
                self._add_all(came)
                self._end(command.id)
            elif command.sampling.prompt_log_probs or command.sampling.top_log_probs:
                self._unscored[command.id] = command
            else:
                came.append(command)
        self._add_all(came)

    def _add_all(self, came: list[AddSequence]) -> None:
        for nth, command in enumerate(came, 1):
            self._add(command, behind=len(came) - nth)
        came.clear()

    def _score_prompt(self) -> None:
        """Read a chunk of one prompt: running sequences wait for no more than that in a step."""
        command = next(iter(self._unscored.values()), None)
        if command is None:
            return
        id, sampling = command.id, command.sampling
        if id not in self._scored:
            if len(self._scored) >= _MOST_SCORED:
                return
            opened = command.input_ids, sampling.top_log_probs, sampling.prompt_log_probs
            self._scored[id] = self._top_log_probs.open(*opened)
        if (scores := self._scored[id].read_prompt()) is None:
            return
        if sampling.prompt_log_probs:
            log_probs, top = scores
            scored = StepOutput(id, [], [], StreamEvent.RUNNING, prompt_log_probs=log_probs, prompt_top_log_probs=top)
            self._ended.append(scored)
        del self._unscored[id]
        self._add(command)

    def _add(self, command: AddSequence, behind: int = 0) -> None:
        """Add a sequence, behind which so many others have come."""
        if not command.max_tokens:
            self._scored.pop(command.id, None)
            self._ended.append(StepOutput(command.id, [], [], StreamEvent.LENGTH))
            return
        config = generation_config(command.max_tokens, command.sampling, command.stop_ids, command.guide)
        if command.sampling.log_probs or command.sampling.top_log_probs:
            self._log_probs.add(command.id)
        if not self._drafting.admit(command, config, len(self._handles) + len(self._prompts), behind):
            self._prompts[command.id], self._read_tokens[command.id] = (command, config), command.cached_tokens
            self._await(command)
        elif not self._start(self._drafting.pipeline, command, config):
            return
        if not command.sampling.top_log_probs:
            self._scored.pop(command.id, None)
        self._without_token[command.id] = command

    def _await(self, command: AddSequence) -> None:
        """Have a prompt wait for the earlier one that has most of its blocks: read together, each would compute them.
        Not for one in the pipeline that drafts, which has a prefix cache of its own."""
        most = command.cached_tokens
        for id, other in self._without_token.items():
            if id == command.id:
                return
            shared = self._partial_blocks.shared(command.input_ids, other.input_ids)
            if shared > most and id not in self._drafting:
                self._awaited[command.id], most = (id, shared), shared

    def _waits(self, id: int) -> bool:
        """Return whether a prompt waits for another one; where it no longer does, take in what that one has read."""
        if id not in self._awaited:
            return False
        other, tokens = self._awaited[id]
        if other in self._without_token and self._read_tokens.get(other, 0) < tokens:
            return True
        del self._awaited[id]
        command, config = self._prompts[id]
        command = dataclasses.replace(command, cached_tokens=max(tokens, command.cached_tokens))
        self._prompts[id], self._read_tokens[id] = (command, config), command.cached_tokens
        self._await(command)
        return id in self._awaited

    def _start_prompts(self) -> None:
        """Start the prompts that the next step reads to their ends, and a piece of the first one that it does not."""
        if self._piece is not None:
            return
        left = short = full = sys.maxsize
        if self._step_budget is not None:
            begin, running = next(iter(self._read_tokens.values()), 0), self._decoding()
            left = self._step_budget.tokens(running, len(self._prompts), begin)
            short, full = self._step_budget.short, max(1, self._step_budget.most - running)
        long = None
        for id in list(self._prompts):
            if self._prompt_tokens >= full:  # a sequence that is moved meanwhile goes before the others
                break
            if self._waits(id):
                continue
            command, config = self._prompts[id]
            read = self._read_tokens[id]
            unread = command.input_ids.size - read
            # Short prompts do not wait for long ones before them. The rest of one that is read in pieces is the last of
            # them, however short.
            whole = 0 if read > command.cached_tokens else short
            if unread > (whole if long is not None else max(left, whole)):
                long = long or command
                continue
            del self._prompts[id], self._read_tokens[id]
            left -= unread
            self._drafting.follow(command)
            if self._start(self._pipeline, command, config):  # steps that it waits for do not read it
                self._count(read, unread)
        if long is not None:
            unread = long.input_ids.size - self._read_tokens[long.id]
            blocks = min(max(1, round(left / BLOCK_TOKENS)), (unread - 1) // BLOCK_TOKENS)
            self._start_piece(long, blocks * BLOCK_TOKENS)

    def _start_piece(self, command: AddSequence, tokens: int) -> None:
        """Read further tokens of a prompt, whole blocks, into the prefix cache, where the sequence finds them."""
        if not tokens:
            return
        begin = self._read_tokens[command.id]
        self._read_tokens[command.id] += tokens
        ids = command.input_ids[: begin + tokens]
        self._pieces += 1
        self._keep_apart(_PIECE_IDS + self._pieces, ids)
        self._count(begin, tokens)
        self._begun[command.id] = command.cached_tokens
        config = generation_config(1, SamplingParams(top_k=1), frozenset())
        self._piece = self._pipeline.add_request(_PIECE_IDS + self._pieces, ov.Tensor(ids[None]), config)

    def _count(self, begin: int, tokens: int) -> None:
        """Add tokens of a prompt from ``begin`` on to those of the next step."""
        self._prompt_tokens += tokens
        self._attended += attended(begin, tokens)

    def _start(
        self, pipeline: genai.ContinuousBatchingPipeline, command: AddSequence, config: genai.GenerationConfig
    ) -> bool:
        """Add a sequence to a pipeline; return False, with its end in the next report, if that refuses it."""
        self._keep_apart(command.id, command.input_ids)
        try:
            self._handles[command.id] = pipeline.add_request(command.id, ov.Tensor(command.input_ids[None]), config)
        except RuntimeError as exc:
            self._forget(command.id)
            self._ended.append(StepOutput(command.id, [], [], StreamEvent.ERROR, error=last_line(exc)))
            return False
        self._begun[command.id] = command.cached_tokens
        return True

    def _keep_apart(self, id: int, ids: np.ndarray) -> None:
        """Step until these ids do not start together with others that were added."""
        while not self._partial_blocks.add(id, ids):
            self._advance(time.monotonic_ns())

    def _leave_drafting(self) -> None:
        """Continue sequences that are drafted for in the plain pipeline, from the ids they have, where that one has any
        or drafts lose.

        As many in each step as it may read the tokens of, one at least, since they are read again: more would stop all
        streams for as long as all of them take. None in the step that reads the first prompt of the plain pipeline,
        which would wait for it.
        """
        if not self._drafting or self._drafting.returning or not (self._plain() or self._drafting.loses()):
            return
        if any(id not in self._without_token for id in self._prompts):  # one that was moved, with a long text
            return
        left = self._step_budget.tokens(self._decoding(), len(self._prompts), 0) if self._step_budget else 0
        most = sys.maxsize
        while command := self._drafting.leave(self._partial_blocks.starts, most):
            config = self._stopped(command)
            self._prompts[command.id], self._read_tokens[command.id] = (command, config), 0
            for waiting in (self._prompts, self._read_tokens):
                waiting.move_to_end(command.id, last=False)  # its stream has begun
            most = left = left - command.input_ids.size
        if not self._drafting:
            self._step(drafts=True, plain=False)  # frees its blocks

    def _return_to_drafting(self) -> None:
        """Continue a sequence of the plain pipeline in the one that drafts, where few are left of a busier time."""
        if self._prompts or self._piece is not None:
            self._drafting.returning = False  # the plain pipeline is to read these
            return
        if self._unscored or self._leaving:
            return
        command = self._drafting.back()
        if command is None:
            return
        config = self._stopped(command)
        self._drafting.take_back(command, config)
        self._start(self._drafting.pipeline, command, config)
        if not self._plain():
            self._step(drafts=False, plain=True)  # frees its blocks

    def _stopped(self, command: AddSequence) -> genai.GenerationConfig:
        """Stop a sequence in its pipeline; return the configuration with which another one continues it."""
        self._handles.pop(command.id).cancel()
        self._partial_blocks.end(command.id)
        return generation_config(command.max_tokens, command.sampling, command.stop_ids)

    def _end(self, id: int) -> None:
        if self._partial_blocks.starts(id):
            self._leaving.add(id)
            return
        handle, unscored = self._handles.pop(id, None), self._unscored.pop(id, None) or self._prompts.pop(id, None)
        drafted = id in self._drafting
        if id in self._read_tokens:  # all that those that wait for it will find
            for waiting, (other, tokens) in self._awaited.items():
                if other == id:
                    self._awaited[waiting] = id, min(tokens, self._read_tokens[id])
        self._forget(id)
        if handle is None and unscored is None:
            return
        self._ended.append(StepOutput(id, [], [], StreamEvent.CANCELLED))
        if handle is not None:
            handle.cancel()
            # A pipeline frees a cancelled sequence's blocks in its next step, and no live sequence of it causes one.
            if not (len(self._drafting) if drafted else self._plain()):
                self._step(drafts=drafted, plain=not drafted)
            if not self._handles:
                self._report(time.monotonic_ns())

    def _forget(self, id: int) -> None:
        self._without_token.pop(id, None)
        self._log_probs.discard(id)
        self._read_tokens.pop(id, None)
        self._awaited.pop(id, None)
        self._scored.pop(id, None)
        self._drafting.end(id)
        self._partial_blocks.end(id)

    def _report(self, start_ns: int) -> None:
        """Send what the step added to every sequence."""
        outputs, self._ended = self._ended, []
        begun, self._begun = self._begun, {}
        for id, handle in list(self._handles.items()):
            output = self._read(id, handle)
            if output is not None:
                outputs.append(output)
        context = len(self._without_token), sum(command.input_ids.size for command in self._without_token.values())
        gauges = self._scheduled, *context, self._cache_usage, *self._drafting.take_counts()
        self._connection.send(StepReport(start_ns, time.monotonic_ns(), outputs, *gauges, begun))

    def _read(self, id: int, handle: genai.GenerationHandle) -> StepOutput | None:
        token_ids: list[int] = []
        log_probs: list[float] = []
        finish = genai.GenerationFinishReason.NONE
        # read() on an empty queue blocks for ever, with the interpreter lock held.
        while handle.can_read():
            for output in handle.read().values():
                token_ids += output.generated_ids
                if id in self._log_probs:  # without them greedy requests get zeros
                    log_probs += output.generated_log_probs
                finish = output.finish_reason
        event = StreamEvent.RUNNING
        status = handle.get_status()
        if status == genai.GenerationStatus.IGNORED:
            event = StreamEvent.ERROR
        elif status != genai.GenerationStatus.RUNNING:
            event = StreamEvent.LENGTH if finish == genai.GenerationFinishReason.LENGTH else StreamEvent.STOP
        if token_ids:
            self._without_token.pop(id, None)
        self._partial_blocks.generated(id, token_ids)
        self._drafting.observe(id, token_ids)
        scored = self._scored.get(id)
        chosen, top = scored.score(token_ids) if scored and token_ids else ([], [])
        if event.last:
            del self._handles[id]
            self._forget(id)
        elif not token_ids:
            return None
        error = "the KV cache ran out of blocks" if event is StreamEvent.ERROR else ""
        return StepOutput(id, token_ids, chosen or log_probs, event, top, error)


def open_pipeline(
    engine_dir: Path, manifest: EngineManifest, properties: dict[str, object] | None = None, blocks: int | None = None
) -> genai.ContinuousBatchingPipeline:
    """Load the weights and allocate the KV cache: 0.4 s for a 10M-parameter model, about 1 s for 160M.

    properties: beside those of the manifest.
    blocks: of the KV cache, if not those of the manifest.
    """
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = blocks or EngineLimits.from_manifest(manifest).kv_cache_blocks
    scheduler.max_num_seqs = manifest.max_batch_size
    scheduler.max_num_batched_tokens = manifest.max_num_tokens
    # Chunked prefill: a long prompt does not hold up running streams.
    scheduler.dynamic_split_fuse = bool(manifest.recipe["chunked_context"])
    scheduler.enable_prefix_caching = bool(manifest.recipe["prefix_reuse"])
    together = {**manifest.properties, **(properties or {})}
    return genai.ContinuousBatchingPipeline(str(engine_dir), scheduler, "CPU", together)


def open_drafting(engine_dir: Path, manifest: EngineManifest) -> Drafting:
    """Return the rule of an engine; its ``load`` loads the weights a second time, into the pipeline that drafts."""
    limits, declared = EngineLimits.from_manifest(manifest), manifest.recipe.get("speculative_decoding")
    if not declared:
        return Drafting(limits)
    lookup = declared["mode"] == "prompt_lookup"
    ngram_size = declared["ngram_size"] if lookup else 0

    def load() -> genai.ContinuousBatchingPipeline:
        properties: dict[str, object] = {"prompt_lookup": True}
        if not lookup:
            properties = {"draft_model": genai.draft_model(str(engine_dir / DRAFT), "CPU", **manifest.properties)}
        pipeline = open_pipeline(engine_dir, manifest, properties, limits.draft_pool_blocks)
        # A pipeline's first token takes a third of a second longer, for 135M parameters. The prompt is one whole block:
        # requests that start together corrupt a block that the prefix cache holds in part.
        config = genai.GenerationConfig(max_new_tokens=1, num_assistant_tokens=1, max_ngram_size=ngram_size)
        handle = pipeline.add_request(0, ov.Tensor(np.zeros((1, BLOCK_TOKENS), np.int64)), config)
        while handle.get_status() == genai.GenerationStatus.RUNNING:
            pipeline.step()
        return pipeline

    drafting = Drafting(limits, ngram_size)
    drafting.load_with(load)
    return drafting


def generation_config(
    max_tokens: int, sampling: SamplingParams, stop_ids: frozenset[int], guide: Guide | None = None
) -> genai.GenerationConfig:
    """Return OpenVINO GenAI's form of the sampling parameters; only ``stop_ids`` end a sequence.

    Without an end id the pipeline uses those of generation_config.json. Setting one of the stop ids as the end id
    prevents this; without stop ids ``ignore_eos`` does (it would ignore stop ids too).
    """
    config = genai.GenerationConfig()
    config.max_new_tokens = max_tokens
    if stop_ids:
        config.set_eos_token_id(min(stop_ids))
        config.stop_token_ids = set(stop_ids)
    else:
        config.ignore_eos = True
    config.min_new_tokens = min(sampling.min_tokens, max_tokens) if stop_ids else 0
    if guide is not None:
        config.structured_output_config = structured_output(guide)
    config.repetition_penalty = sampling.repetition_penalty
    config.presence_penalty = sampling.presence_penalty
    config.frequency_penalty = sampling.frequency_penalty
    config.logprobs = int(sampling.log_probs or sampling.top_log_probs > 0)
    config.do_sample = not sampling.greedy
    if config.do_sample:
        config.temperature = sampling.temperature
        config.top_p = sampling.top_p
        config.min_p = sampling.min_p
        if sampling.top_k:
            config.top_k = sampling.top_k
        drawn = int.from_bytes(os.urandom(4), "little")
        config.rng_seed = drawn if sampling.seed is None else fold_seed(sampling.seed)
    return config


def fold_seed(seed: int) -> int:
    """Fold a uint64 seed into the 32 bits that GenAI uses. Seeds below 2**32 are unchanged; seeds that differ only in
    the high half stay different."""
    return (seed ^ (seed >> 32) * 0x9E3779B1) & 0xFFFFFFFF


def _lower_cpu_priority() -> None:
    """Let the processes that carry tokens away, clients included, run before the step loop, which uses every core.

    On kernels that schedule by session (autogroup) a new session is a scheduling group of its own: in the server's
    group the loop starved readers outside it for up to a second on two cores (benchmarks/LOG.md).
    """
    os.setsid()
    os.nice(_NICE)
    with contextlib.suppress(OSError):  # a kernel without autogroups
        Path("/proc/self/autogroup").write_text(str(_NICE))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops the server, which drains before it ends this process
    descriptor, engine_dir = int(sys.argv[1]), Path(sys.argv[2])
    _lower_cpu_priority()
    thread_dump.write_on_signal()
    connection = Connection(descriptor)
    try:
        manifest = manifests.load(engine_dir)
        pipeline, drafting = open_pipeline(engine_dir, manifest), open_drafting(engine_dir, manifest)
        connection.send(Ready())
        top_log_probs = TopLogProbsModel(engine_dir / "openvino_model.xml", manifest.properties)
        limits = EngineLimits.from_manifest(manifest)
        partial_blocks = PartialBlocks(limits.kv_cache_blocks if manifest.recipe["prefix_reuse"] else 0)
        cuts_prompts = manifest.recipe["prefix_reuse"] and manifest.recipe["chunked_context"]
        budget = StepBudget(manifest.max_num_tokens) if cuts_prompts else None
        StepLoop(pipeline, top_log_probs, connection, drafting, partial_blocks, budget).run()
    except (EOFError, ConnectionError):
        return  # the engine model closed the connection
    except Exception as exc:
        connection.send(Failed(last_line(exc)))
        raise


if __name__ == "__main__":
    main()
