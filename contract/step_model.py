"""How long one engine step takes: the model that admission, routing, scaling, planner and simulator share.

``python -m benchmarks calibrate`` fits it to a running replica and writes ``engines/<name>/step_model.json`` beside the
manifest whose digest it carries; ``of_engine`` reads it. No coefficient is negative, so no argument shortens the
engine's part of a step. Beyond ``FEW_STREAMS`` tokens wait longer to be sent together, and steps may be shorter.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from contract import manifest
from contract.errors import EngineFailed, InvalidArgument, NotFound
from contract.scheduling import LEAST_SPEEDUP, TIMED_TOGETHER, UNDRAFTED_FROM, drafts_beside, window_s

FILE_NAME = "step_model.json"
# 1: steps held what sending takes; 2: engines that draft were taken for plain ones; 3: a text had one acceptance; 4: no
# reference_s, and windows by the number of streams alone; 5: drafts took as long for each token of theirs.
FORMAT = 6
METRIC = "trident_engine_step_seconds"  # a gauge for each name of ``StepModel.exported``, label "term"
MEASURED, PUBLISHED, ROOFLINE = SOURCES = ("measured", "published", "roofline")
# Positions in an answer from which each number of a text's acceptance holds: most texts begin to repeat themselves.
STRETCHES = 0, 8, 16, 32, 64
TYPICAL_ANSWER = 64  # tokens
MOST_DRAFT_TOKENS = 1024
FEW = 8  # sequences beyond the first ones share what a step reads of the weights
DRIFT = 0.15  # more or less than 1 times what they took when calibrated: forecasts by the model tell nothing
ROUND_OFF = 1e-18  # of a sum of squared relative errors: processors differ in the last bits of an exact answer
_PART = 0.45  # steps in a window beyond the quotient, in the mean; measured, from 1 stream to 64


@dataclass(frozen=True)
class Point:
    """A measured step: sequences that decode, tokens in their caches, prompt tokens computed beside them, seconds.
    drafted: sequences that are drafted for."""

    sequences: float
    context_tokens: float
    prefill_tokens: float
    seconds: float
    drafted: float = 0.0

    @property
    def work(self) -> tuple[float, float, float, float]:
        """The arguments of ``StepModel.seconds``."""
        return self.sequences, self.context_tokens, self.prefill_tokens, self.drafted


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """Seconds of one engine step, and what follows from them.

    manifest_sha256: of the engine's manifest.json; "" of an estimate for no built engine.
    machine: what it was measured on, as ``machine_kind`` says it, or the name of an accelerator.
    source: measured; published or roofline are estimates.
    made: UTC, ISO 8601. points: measured steps, 0 of an estimate.
    error_p50_percent, error_p95_percent: how far the points are from the model, in per cent of their seconds.
    request_s: seconds until a request's first token that no step takes: transport, tokenizer, detokenizer.
    idle_s: by which the first step after a pause is longer.
    spread: standard deviation of the logarithm of the time of a step with prompts, in service.
    reference_s: geometric mean of the steps of a few trials, which tell later how fast the machine is then; 0 of an
        estimate.
    step_s: of every step. first_sequence_s: for each of the first ``FEW`` sequences. sequence_s: for every sequence.
    context_token_s: for every token that the step's sequences have in their caches.
    prefill_s: of a step with any prompt token. prefill_token_s: for each of them. prefill_square_s: for their square.
    draft_1_s, draft_2_s, draft_4_s, draft_8_s: for the first sequence that is drafted for, the second, the third and
        the fourth, and each one more: with AVX2 the second took three times as much as the third.
    draft_tokens: that a step verifies of a sequence alone; 0 of an engine that does not draft.
    acceptance: for each of some texts, the probabilities that a draft token is accepted if those before it in its step
        were, from each of ``STRETCHES`` on; the last one holds for the rest. They are those of the calibration's texts
        unless others were given (``of_texts``).
    cores: of the machine, which the engine shares with what follows; 0 if that was not measured: the terms hold it.
        CPU seconds are of one core.
    request_cpu_s, burst_cpu_s, message_cpu_s: that Triton, tokenizer, detokenizer and client take for a request, for
        each time that tokens are sent, and for each message of a stream then.
    response_cpu_s: that tritonserver and its stubs take for a response in service, its part of the requests included:
        the engine sets by it how long tokens wait to be sent together.
    gateway_s: of a request's time to the first token, spent in a gateway.
    gateway_request_cpu_s, gateway_burst_cpu_s, gateway_message_cpu_s: that they and a gateway take together, where
        requests come through one.
    """

    manifest_sha256: str
    machine: str
    source: str
    made: str
    step_s: float
    sequence_s: float
    prefill_token_s: float
    first_sequence_s: float = 0.0
    context_token_s: float = 0.0
    prefill_s: float = 0.0
    prefill_square_s: float = 0.0
    draft_1_s: float = 0.0
    draft_2_s: float = 0.0
    draft_4_s: float = 0.0
    draft_8_s: float = 0.0
    draft_tokens: int = 0
    acceptance: tuple[tuple[float, ...], ...] = ()
    request_s: float = 0.0
    idle_s: float = 0.0
    spread: float = 0.0
    reference_s: float = 0.0
    cores: int = 0
    request_cpu_s: float = 0.0
    burst_cpu_s: float = 0.0
    message_cpu_s: float = 0.0
    response_cpu_s: float = 0.0
    gateway_s: float = 0.0
    gateway_request_cpu_s: float = 0.0
    gateway_burst_cpu_s: float = 0.0
    gateway_message_cpu_s: float = 0.0
    points: int = 0
    error_p50_percent: float = 0.0
    error_p95_percent: float = 0.0

    def __post_init__(self) -> None:
        """Raises InvalidArgument for a field that holds what it may not."""
        if not re.fullmatch(r"([0-9a-f]{64})?", self.manifest_sha256):
            raise InvalidArgument("manifest_sha256", f"must be 64 hex digits or empty, got {self.manifest_sha256!r}")
        if self.source not in SOURCES:
            raise InvalidArgument("source", f"must be one of {', '.join(SOURCES)}, got {self.source!r}")
        for name in _NUMBERS:
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidArgument(name, f"must be a finite number from 0, got {getattr(self, name)!r}")
        if not (isinstance(self.draft_tokens, int) and self.draft_tokens <= MOST_DRAFT_TOKENS):
            allowed = f"a whole number from 0 to {MOST_DRAFT_TOKENS}"
            raise InvalidArgument("draft_tokens", f"must be {allowed}, got {self.draft_tokens!r}")
        for text in self.acceptance:
            if not (1 <= len(text) <= len(STRETCHES) and all(0 <= part <= 1 for part in text)):
                allowed = f"1 to {len(STRETCHES)} numbers from 0 to 1 for each text"
                raise InvalidArgument("acceptance", f"must be {allowed}, got {list(text)}")
        if not self.step_s + self.sequence_s + self.first_sequence_s > 0:
            raise InvalidArgument("step_s", "or sequence_s must be above 0: no step takes no time")

    @property
    def terms(self) -> dict[str, float]:
        """The engine's seconds by name."""
        return {name: getattr(self, name) for name in TERMS}

    @property
    def exported(self) -> dict[str, float]:
        """The seconds by name, as a server exports them in ``METRIC``."""
        cores = self.cores or math.inf
        return self.terms | {f"{name}_s": getattr(self, f"{name}_cpu_s") / cores for name in _SENDING}

    @staticmethod
    def of_exported(manifest_sha256: str, exported: Mapping[str, float]) -> StepModel:
        """Raises InvalidArgument: names the field."""
        known: dict[str, Any] = {name: exported.get(name, 0.0) for name in TERMS}
        known |= {f"{name}_cpu_s": exported.get(f"{name}_s", 0.0) for name in _SENDING}
        return StepModel(manifest_sha256=manifest_sha256, machine="", source=MEASURED, made="", cores=1, **known)

    @property
    def behind_gateway(self) -> StepModel:
        """The model where requests come through a gateway on the same machine."""
        names = ("request_cpu_s", "burst_cpu_s", "message_cpu_s")
        through: dict[str, Any] = {name: getattr(self, f"gateway_{name}") for name in names}
        return replace(self, **through)

    def at_pace(self, steps_take: float) -> StepModel:
        """Return the model where everything takes ``steps_take`` times as long, as on a machine that became slower."""
        return replace(self, **{name: getattr(self, name) * steps_take for name in _NUMBERS if name.endswith("_s")})

    def of_texts(self, acceptance: tuple[tuple[float, ...], ...], field: str) -> StepModel:
        """Return the model for other texts, with () for the same. Raises InvalidArgument for ``field``."""
        acceptance = acceptance or self.acceptance
        if bool(acceptance) != (self.draft_tokens > 0):
            allowed = "given" if self.draft_tokens else "left out: the engine does not draft"
            raise InvalidArgument(field, f"must be {allowed}, got {[list(text) for text in acceptance]}")
        return replace(self, acceptance=acceptance)

    @property
    def tokens_per_step(self) -> float:
        """Of a sequence that is drafted for alone: the tokens of typical answers by the steps that they take."""
        return self._made_per_step(self.draft_tokens)

    def _made_per_step(self, draft_tokens: int) -> float:
        steps, ends = 0.0, (*STRETCHES[1:], TYPICAL_ANSWER)
        for text in self.acceptance:
            for begin, end in zip(STRETCHES, ends, strict=True):
                steps += (end - begin) / tokens_per_step(accepted_at(text, begin), draft_tokens)
        return len(self.acceptance) * TYPICAL_ANSWER / steps if steps else 1.0

    def drafts_speedup(self, sequences: int = 1) -> float:
        """Return the tokens per second of so many sequences with drafts over those without; 1 where none are made."""
        drafted = sequences if self.draft_tokens else 0
        plain_s, drafted_s = (self.engine_s(sequences, 0, 0, number) for number in (0, drafted))
        made = self._made_per_step(drafts_beside(self.draft_tokens, sequences - 1))
        return made * (plain_s / drafted_s if drafted_s else 1.0)

    @property
    def drafted_up_to(self) -> int:
        """The most sequences that an engine drafts for; 0 where that gains nothing."""
        return next((n for n in range(UNDRAFTED_FROM, 0, -1) if self.drafts_speedup(n) >= LEAST_SPEEDUP), 0)

    @property
    def estimated(self) -> bool:
        return self.source != MEASURED

    def seconds(self, sequences: float, context_tokens: float, prefill_tokens: float, drafted: float = 0) -> float:
        """Return the seconds of a step, with what sending its tokens takes of the cores.

        sequences: that get a token each, and what is accepted of the drafts. context_tokens: of all of them together.
        prefill_tokens: of prompts, computed in the same step. drafted: of the sequences, those that are drafted for.
        """
        own_s = self.engine_s(sequences, context_tokens, prefill_tokens, drafted)
        if not (self.cores and sequences):
            return own_s
        sent_s = self.sent_s(sequences)
        # A step of s seconds sends once in wait / s + _PART steps: s = own + sent / (wait / s + _PART).
        wait_s = window_s(sequences, self.response_cpu_s, self.cores)
        half = (wait_s - sent_s - own_s * _PART) / 2
        return min(own_s + sent_s, (math.sqrt(half * half + _PART * own_s * wait_s) - half) / _PART)

    def engine_s(self, sequences: float, context_tokens: float, prefill_tokens: float, drafted: float = 0) -> float:
        """Return the seconds of a step without what sending takes."""
        values = _features(sequences, context_tokens, prefill_tokens, drafted)
        return sum(getattr(self, name) * value for name, value in zip(TERMS, values, strict=True))

    def sent_s(self, sequences: float) -> float:
        """Return the seconds by which a step is longer whose tokens, and those before them, are sent."""
        return (self.burst_cpu_s + sequences * self.message_cpu_s) / self.cores if self.cores else 0.0

    def decode_tokens_per_s(self, sequences: float, context_tokens: float) -> float:
        """Return the tokens per second of ``sequences`` that decode. context_tokens: of each."""
        return sequences / self.seconds(sequences, sequences * context_tokens, 0) if sequences else 0.0

    def prompt_s(self, tokens: int, chunk_tokens: int, sequences: float = 0, context_tokens: float = 0) -> float:
        """Return the seconds of the steps that compute a prompt, beside sequences that decode.

        chunk_tokens: of a step, the decoding sequences included (max_num_tokens). context_tokens: of each sequence.
        """
        chunk = max(1, chunk_tokens - math.ceil(sequences))
        chunks = [min(chunk, tokens - begin) for begin in range(0, tokens, chunk)]
        return sum(self.seconds(sequences, sequences * context_tokens, part) for part in chunks)

    def prefill_weight(self, sequences: float, context_tokens: float) -> float:
        """Return the work of a prompt token in tokens of decoding, beside sequences with ``context_tokens`` each."""
        return self.prefill_token_s * self.decode_tokens_per_s(sequences, context_tokens)

    def operating_point(
        self, step_limit_s: float, most: int, context_tokens: float, prefill_tokens: float = 0.0
    ) -> int:
        """Return how many sequences may decode while a step takes at most ``step_limit_s``; 0 if none may.

        most: slots. context_tokens: of each. prefill_tokens: for each decoded token, at a steady load the prompt's
        length over the answer's.
        """
        counts = range(most, 0, -1)  # not halved: one more than FEW_STREAMS may take a shorter step
        within = (n for n in counts if self.seconds(n, n * context_tokens, n * prefill_tokens) <= step_limit_s)
        return next(within, 0)

    def save(self, folder: Path) -> Path:
        """Write step_model.json of an engine's folder atomically; return its path."""
        path = folder / FILE_NAME
        manifest.write_atomically(path, json.dumps(self.to_json(), indent=2) + "\n")
        return path

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @staticmethod
    def from_json(table: object) -> StepModel:
        """Raises InvalidArgument: names the field."""
        if not isinstance(table, dict):
            raise InvalidArgument("", "it is not a JSON object")
        if table.get("format") != FORMAT:
            raise InvalidArgument("format", f"must be {FORMAT}, got {table.get('format')!r}: calibrate again")
        known = {field.name: field for field in fields(StepModel)}
        for name in table.keys() - known.keys() - {"format"}:
            raise InvalidArgument(str(name), "is no field of a step model")
        told = {name: value for name, value in table.items() if name not in ("format", "acceptance")}
        if not isinstance(acceptance := texts(table.get("acceptance", [])), tuple):
            raise InvalidArgument("acceptance", f"must be a list of numbers for each text, got {acceptance!r}")
        for name, value in (*told.items(), *(("acceptance", value) for text in acceptance for value in text)):
            number = name in _NUMBERS or name == "acceptance"
            if not isinstance(value, (int, float) if number else str) or isinstance(value, bool):
                raise InvalidArgument(name, f"must be {'a number' if number else 'a text'}, got {value!r}")
        try:
            return StepModel(**told, acceptance=acceptance)
        except TypeError as exc:
            missing = next(name for name in known if name not in table)
            raise InvalidArgument(missing, "is missing") from exc


def load(path: Path) -> StepModel:
    """Read a step model. Raises NotFound, EngineFailed: there is none, or it is damaged."""
    try:
        return StepModel.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as exc:
        name = path.parent.name
        raise NotFound(f"{name} was not calibrated; `python -m benchmarks calibrate --engine {name}` does it") from exc
    except (OSError, ValueError, InvalidArgument) as exc:
        raise EngineFailed(f"{path}: {exc}") from exc


def of_engine(folder: Path) -> StepModel:
    """Return the step model of an engine on this machine.

    Raises NotFound: it was not calibrated, or before it was built anew, or on another kind of machine.
    Raises EngineFailed: the file is damaged.
    """
    model = load(folder / FILE_NAME)
    again = f"`python -m benchmarks calibrate --engine {folder.name}` measures it again"
    if model.manifest_sha256 != manifest.sha256_file(folder / manifest.FILE_NAME):
        raise NotFound(f"{folder / FILE_NAME} is of another build of {folder.name}; {again}")
    if not model.estimated and model.machine != machine_kind():
        raise NotFound(f"{folder / FILE_NAME} was measured on {model.machine}, this is {machine_kind()}; {again}")
    return model


def fit(points: Sequence[Point], sent_s: Sequence[float] = ()) -> tuple[dict[str, float], float, float]:
    """Fit the terms of a StepModel: least squares of the relative errors, no coefficient below 0. Needs numpy.

    points: those of no sequences were measured after a pause.
    sent_s: of each point's seconds, what was spent on sending; none by default.
    Returns the terms by name, with idle_s, and the 50th and 95th percentile of the points' errors in per cent.
    Raises InvalidArgument: too few points, or seconds that are not above 0.
    """
    import numpy as np  # clients read models without it

    if len(points) < 3:
        raise InvalidArgument("points", f"must be 3 at least, got {len(points)}")
    if wrong := [point for point in points if not 0 < point.seconds < math.inf]:
        raise InvalidArgument("seconds", f"must be above 0, got {wrong[0]}")
    seconds = np.array([point.seconds for point in points])
    # Last, so that where no prompt was measured beside sequences prefill_s is found instead, which holds as much.
    names = (*TERMS, "idle_s")
    rows = [(*_features(*point.work), float(not point.sequences)) for point in points]
    relative = np.array(rows) / seconds[:, None]
    scale = np.abs(relative).max(axis=0)
    own = 1 - np.array(sent_s or [0.0] * len(points)) / seconds
    usable = [term for term in range(len(names)) if scale[term] > 0]
    best, least = np.zeros(len(names)), math.inf
    # The best of all subsets whose solution has no negative part: with so few terms the exact answer is the simple one.
    for count in range(1, len(usable) + 1):
        for subset in map(list, itertools.combinations(usable, count)):
            found, *_ = np.linalg.lstsq(relative[:, subset] / scale[subset], own, rcond=None)
            missed = float(((relative[:, subset] / scale[subset] @ found - own) ** 2).sum())
            if found.min() >= 0 and missed < least * (1 - 1e-9) - ROUND_OFF:
                best, least = np.zeros(len(names)), missed
                best[subset] = found / scale[subset]
    errors = 100 * np.abs(relative @ best - own)
    p50, p95 = (float(value) for value in np.percentile(errors, [50, 95]))
    return dict(zip(names, map(float, best), strict=True)), p50, p95


def texts(acceptance: Any) -> Any:
    """Return the acceptance of some texts as ``StepModel`` has it, and what is none as it is.

    acceptance: a number, or a list that has for each text a number or a list of them.
    """
    if isinstance(acceptance, (int, float)) and not isinstance(acceptance, bool):
        acceptance = [acceptance]
    if not isinstance(acceptance, (list, tuple)):
        return acceptance
    return tuple(tuple(text) if isinstance(text, (list, tuple)) else (text,) for text in acceptance)


def accepted_at(text: Sequence[float], position: int) -> float:
    """Return the acceptance of a text at a position of the answer."""
    return text[min(len(text), bisect.bisect_right(STRETCHES, position)) - 1]


def tokens_per_step(acceptance: float, draft_tokens: int) -> float:
    """Return the tokens that a step makes of a sequence with so many drafts. acceptance: that holds there."""
    return sum(acceptance**nth for nth in range(draft_tokens + 1))


def drifted(steps_take: float) -> bool:
    """Whether steps take so many times what they took when calibrated that forecasts are not compared by them."""
    return abs(steps_take - 1) > DRIFT


def described_drift(steps_take: float) -> str:
    again = ": calibrate again, forecasts are of another speed" if drifted(steps_take) else ""
    return f"steps take {steps_take:.2f} times what they took when the engine was calibrated{again}"


def processor() -> str:
    """Return the name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def machine_kind() -> str:
    """Return what this machine is, as far as the speed of an engine depends on it: processor and cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{processor()}, {cores} cores"


TERMS = (
    *("step_s", "first_sequence_s", "sequence_s", "context_token_s"),
    *("prefill_s", "prefill_token_s", "prefill_square_s"),
    *(f"draft_{sequences}_s" for sequences in TIMED_TOGETHER),
)
_DRAFTED = (*itertools.pairwise((0, *TIMED_TOGETHER[:-1])), (TIMED_TOGETHER[-2], math.inf))
_UNDRAFTED = (0.0,) * len(TIMED_TOGETHER)
_SENDING = "burst", "message", "response"
BESIDE = (
    *("cores", "request_cpu_s", "burst_cpu_s", "message_cpu_s", "response_cpu_s"),
    *("gateway_s", "gateway_request_cpu_s", "gateway_burst_cpu_s", "gateway_message_cpu_s"),
)
_NUMBERS = tuple(field.name for field in fields(StepModel) if field.type in ("float", "int"))


def _features(sequences: float, context_tokens: float, prefill_tokens: float, drafted: float) -> tuple[float, ...]:
    """Return what each term is multiplied by; none falls when an argument grows."""
    prefill = float(prefill_tokens > 0), prefill_tokens, prefill_tokens * prefill_tokens
    drafts = (max(0.0, min(drafted, most) - least) for least, most in _DRAFTED) if drafted else _UNDRAFTED
    return 1.0, min(sequences, FEW), sequences, context_tokens, *prefill, *drafts
