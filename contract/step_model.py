"""How long one engine step takes: the model that admission, routing, scaling, planner and simulator share.

``python -m benchmarks calibrate`` fits it to a running replica and writes ``engines/<name>/step_model.json`` beside the
manifest whose digest it carries; ``of_engine`` reads it. No coefficient is negative, so no argument shortens a step.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from contract import manifest
from contract.errors import EngineFailed, InvalidArgument, NotFound

FILE_NAME = "step_model.json"
FORMAT = 1
METRIC = "trident_engine_step_seconds"  # a gauge for each term, label "term"
MEASURED, PUBLISHED, ROOFLINE = SOURCES = ("measured", "published", "roofline")
FEW = 8  # sequences beyond the first ones share what a step reads of the weights


@dataclass(frozen=True)
class Point:
    """A measured step: sequences that decode, tokens in their caches, prompt tokens computed beside them, seconds."""

    sequences: float
    context_tokens: float
    prefill_tokens: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """Seconds of one engine step, and what follows from them.

    manifest_sha256: of the engine's manifest.json; "" of an estimate for no built engine.
    machine: what it was measured on, as ``machine_kind`` says it, or the name of an accelerator.
    source: measured; published or roofline are estimates.
    made: UTC, ISO 8601. points: measured steps, 0 of an estimate.
    error_p50_percent, error_p95_percent: how far the points are from the model, in per cent of their seconds.
    request_s: seconds until a request's first token that no step takes: transport, tokenizer, detokenizer.
    step_s: of every step. first_sequence_s: for each of the first ``FEW`` sequences. sequence_s: for every sequence.
    context_token_s: for every token that the step's sequences have in their caches.
    prefill_s: of a step with any prompt token. prefill_token_s: for each of them. prefill_square_s: for their square.
    cores: of the machine, which the engine shares with what follows; 0 if that was not measured. CPU seconds are of one
        core.
    request_cpu_s, burst_cpu_s, message_cpu_s: that Triton, tokenizer, detokenizer and client take for a request, for
        each time that tokens are sent, and for each message of a stream then; the steps hold the last two.
    gateway_s: of a request's time to the first token, spent in a gateway.
    gateway_request_cpu_s, gateway_burst_cpu_s, gateway_message_cpu_s: that a gateway takes.
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
    request_s: float = 0.0
    cores: int = 0
    request_cpu_s: float = 0.0
    burst_cpu_s: float = 0.0
    message_cpu_s: float = 0.0
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
        if not self.step_s + self.sequence_s + self.first_sequence_s > 0:
            raise InvalidArgument("step_s", "or sequence_s must be above 0: no step takes no time")

    @property
    def terms(self) -> dict[str, float]:
        """The seconds by name, as a server exports them in ``METRIC``."""
        return {name: getattr(self, name) for name in TERMS}

    @property
    def estimated(self) -> bool:
        return self.source != MEASURED

    def seconds(self, sequences: float, context_tokens: float, prefill_tokens: float) -> float:
        """Return the seconds of a step.

        sequences: that get a token each. context_tokens: of all of them together.
        prefill_tokens: of prompts, computed in the same step.
        """
        values = _features(sequences, context_tokens, prefill_tokens)
        return sum(getattr(self, name) * value for name, value in zip(TERMS, values, strict=True))

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
        """Return the work of a prompt token in tokens of decoding: its part of a step over that of a sequence.

        context_tokens: of each of ``sequences`` that decode.
        """
        return self.prefill_token_s * self.decode_tokens_per_s(sequences, context_tokens)

    def operating_point(
        self, step_limit_s: float, most: int, context_tokens: float, prefill_tokens: float = 0.0
    ) -> int:
        """Return how many sequences may decode while a step takes at most ``step_limit_s``; 0 if none may.

        most: slots. context_tokens: of each. prefill_tokens: for each decoded token, at a steady load the prompt's
        length over the answer's.
        """
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            within = self.seconds(middle, middle * context_tokens, middle * prefill_tokens) <= step_limit_s
            low, high = (middle, high) if within else (low, middle - 1)
        return low

    def save(self, folder: Path) -> Path:
        """Write step_model.json of an engine's folder atomically; return its path."""
        path, partial = folder / FILE_NAME, folder / f"{FILE_NAME}.partial"
        partial.write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")
        os.replace(partial, path)
        return path

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @staticmethod
    def from_json(table: object) -> StepModel:
        """Raises InvalidArgument: names the field."""
        if not isinstance(table, dict):
            raise InvalidArgument("", "it is not a JSON object")
        if table.get("format") != FORMAT:
            raise InvalidArgument("format", f"must be {FORMAT}, got {table.get('format')!r}")
        known = {field.name: field for field in fields(StepModel)}
        for name in table.keys() - known.keys() - {"format"}:
            raise InvalidArgument(str(name), "is no field of a step model")
        for name, value in table.items():
            kind = (int, float) if name in _NUMBERS else str
            if name != "format" and (not isinstance(value, kind) or isinstance(value, bool)):
                allowed = "a number" if name in _NUMBERS else "a text"
                raise InvalidArgument(name, f"must be {allowed}, got {value!r}")
        try:
            return StepModel(**{name: value for name, value in table.items() if name != "format"})
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

    Raises:
        NotFound: it was not calibrated, or before it was built anew, or on another kind of machine.
        EngineFailed: the file is damaged.
    """
    model = load(folder / FILE_NAME)
    again = f"`python -m benchmarks calibrate --engine {folder.name}` measures it again"
    if model.manifest_sha256 != manifest.sha256_file(folder / manifest.FILE_NAME):
        raise NotFound(f"{folder / FILE_NAME} is of another build of {folder.name}; {again}")
    if not model.estimated and model.machine != machine_kind():
        raise NotFound(f"{folder / FILE_NAME} was measured on {model.machine}, this is {machine_kind()}; {again}")
    return model


def fit(points: Sequence[Point]) -> tuple[dict[str, float], float, float]:
    """Fit the terms of a StepModel: least squares of the relative errors, no coefficient below 0. Needs numpy.

    Returns the terms by name, and the 50th and 95th percentile of the points' errors in per cent.
    Raises InvalidArgument: too few points, or seconds that are not above 0.
    """
    import numpy as np  # clients read models without it

    if len(points) < 3:
        raise InvalidArgument("points", f"must be 3 at least, got {len(points)}")
    if wrong := [point for point in points if not 0 < point.seconds < math.inf]:
        raise InvalidArgument("seconds", f"must be above 0, got {wrong[0]}")
    seconds = np.array([point.seconds for point in points])
    rows = [_features(point.sequences, point.context_tokens, point.prefill_tokens) for point in points]
    relative = np.array(rows) / seconds[:, None]
    scale = np.abs(relative).max(axis=0)
    usable = [term for term in range(len(TERMS)) if scale[term] > 0]
    best, least = np.zeros(len(TERMS)), math.inf
    # The best of all subsets whose solution has no negative part: with so few terms the exact answer is the simple one.
    for count in range(1, len(usable) + 1):
        for subset in map(list, itertools.combinations(usable, count)):
            found, *_ = np.linalg.lstsq(relative[:, subset] / scale[subset], np.ones(len(points)), rcond=None)
            missed = float(((relative[:, subset] / scale[subset] @ found - 1) ** 2).sum())
            if found.min() >= 0 and missed < least * (1 - 1e-9):
                best, least = np.zeros(len(TERMS)), missed
                best[subset] = found / scale[subset]
    errors = 100 * np.abs(relative @ best - 1)
    p50, p95 = (float(value) for value in np.percentile(errors, [50, 95]))
    return dict(zip(TERMS, map(float, best), strict=True)), p50, p95


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
)
BESIDE = (
    *("cores", "request_cpu_s", "burst_cpu_s", "message_cpu_s"),
    *("gateway_s", "gateway_request_cpu_s", "gateway_burst_cpu_s", "gateway_message_cpu_s"),
)
_NUMBERS = (*TERMS, *BESIDE, "request_s", "points", "error_p50_percent", "error_p95_percent")


def _features(sequences: float, context_tokens: float, prefill_tokens: float) -> tuple[float, ...]:
    """Return what each term is multiplied by; none falls when an argument grows."""
    prefill = float(prefill_tokens > 0), prefill_tokens, prefill_tokens * prefill_tokens
    return 1.0, min(sequences, FEW), sequences, context_tokens, *prefill
