"""The quality gate: how far an engine's predictions differ from the bf16 reference on held-out text.

Perplexity, top-1 agreement and KL divergence come from the logits of both at every position; ``gate`` holds them
against the recipe's budget. Logits may come from anywhere (numpy, OpenVINO, TensorRT-LLM): only numpy is needed here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from build.base.checkpoint import open_checkpoint
from build.model import decoder
from build.quantise import hf_quantised, trtllm_checkpoint
from build.recipe.recipe import QualityBudget
from contract.errors import InvalidArgument, TridentError
from contract.paired_scores import mean_interval

RUN_TOKENS = 16  # neighbouring positions err together, so runs of them are resampled and not each by itself


class BeyondBudget(TridentError):
    """An engine's quality is outside its recipe's budget. ``verdict`` says by how much."""

    def __init__(self, message: str, verdict: Verdict) -> None:
        self.verdict = verdict
        super().__init__(message)


@dataclass(frozen=True)
class Quality:
    """One engine against the reference, over ``tokens`` predicted tokens. kl, kl_p99, conviction: nats per token.

    perplexity: exp of the mean negative log likelihood of the text. perplexity_ratio: engine over reference.
    top1_agreement: share of positions where both have the same most likely token. kl: mean KL(reference || engine).
    non_finite: positions where the engine's logits are not numbers; they count as disagreement, and with any of them
    perplexity and KL are infinite. conviction: mean KL(reference || all ids alike), what the reference has to lose.
    intervals: of perplexity_ratio, top1_agreement and kl, 95 %, by bootstrap; none of a few tokens or if not finite.
    """

    tokens: int
    reference_perplexity: float
    perplexity: float
    perplexity_ratio: float
    top1_agreement: float
    kl: float
    kl_p99: float
    non_finite: int
    conviction: float
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """passed: within budget. problems: one sentence per bound that is broken. override: why it is used all the same."""

    passed: bool
    problems: tuple[str, ...]
    override: str | None = None

    @property
    def accepted(self) -> bool:
        return self.passed or self.override is not None


class Comparison:
    """Collects the logits of reference and engine block by block; :meth:`quality` sums up what was seen so far."""

    def __init__(self) -> None:
        self._blocks: list[tuple[np.ndarray, ...]] = []  # what ``add`` measures, per position

    def add(self, reference: np.ndarray, engine: np.ndarray, ids: np.ndarray) -> None:
        """reference: f32[t, vocab], engine: f32[t, >= vocab], ids: i64[t], the tokens both were given.

        Position i is scored on ids[i + 1]. An engine's columns beyond the reference's vocabulary (padding, rule R37)
        take probability from the real ones and are counted so. Raises ValueError where shapes do not fit.
        """
        if reference.ndim != 2 or engine.ndim != 2 or not len(reference) == len(engine) == len(ids):
            raise ValueError(f"{reference.shape} and {engine.shape} logits do not fit {len(ids)} tokens")
        if engine.shape[1] < (vocab := reference.shape[1]):
            raise ValueError(f"the engine has {engine.shape[1]} logits, fewer than the reference's {vocab}")
        if len(ids) < 2:
            return
        targets = np.asarray(ids[1:])[:, None]
        finite = np.isfinite(engine[:-1]).all(-1)
        ours = log_softmax(np.where(finite[:, None], engine[:-1], 0))
        theirs = log_softmax(reference[:-1])
        if not np.isfinite(theirs).all():
            raise ValueError("the reference's logits are not finite; it cannot be measured against")
        kl = (np.exp(theirs) * (theirs - ours[:, :vocab])).sum(-1)
        measured = (
            -np.take_along_axis(theirs, targets, -1)[:, 0],
            np.where(finite, -np.take_along_axis(ours, targets, -1)[:, 0], np.inf),
            np.where(finite, np.maximum(kl, 0), np.inf),  # rounding can make zero slightly negative
            finite & (reference[:-1].argmax(-1) == engine[:-1].argmax(-1)),
            finite,
            (np.exp(theirs) * (theirs + math.log(vocab))).sum(-1),
        )
        self._blocks.append(measured)

    def quality(self) -> Quality:
        """Raises ValueError before the first predicted token."""
        if not self._blocks:
            raise ValueError("no token was predicted; evaluation blocks need at least two tokens")
        reference, engine, kl, same, finite, conviction = map(np.concatenate, zip(*self._blocks, strict=True))
        return Quality(
            tokens=len(kl),
            reference_perplexity=_perplexity(reference),
            perplexity=_perplexity(engine),
            perplexity_ratio=_perplexity(engine - reference),  # of random weights both may be beyond all numbers
            top1_agreement=float(same.mean()),
            kl=float(kl.mean()),
            kl_p99=float(np.quantile(kl, 0.99, method="higher")),
            non_finite=int((~finite).sum()),
            conviction=float(conviction.mean()),
            intervals=_intervals(engine - reference, same, kl),
        )


def _intervals(log_ratio: np.ndarray, same: np.ndarray, kl: np.ndarray) -> dict[str, tuple[float, float]]:
    """Return Quality.intervals of what was measured at each position: f64[n], bool[n], f64[n]."""
    whole = len(kl) // RUN_TOKENS * RUN_TOKENS
    if whole < 2 * RUN_TOKENS or not np.isfinite(log_ratio + kl).all():
        return {}
    found = {"perplexity_ratio": log_ratio, "top1_agreement": same, "kl": kl}
    bounds = {name: mean_interval(of[:whole].reshape(-1, RUN_TOKENS).mean(1)) for name, of in found.items()}
    low, high = bounds["perplexity_ratio"]
    return bounds | {"perplexity_ratio": (math.exp(min(low, 700)), math.exp(min(high, 700)))}


def _perplexity(nll: np.ndarray) -> float:
    mean = float(nll.mean())
    return math.exp(mean) if mean < 700 else math.inf


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """f32[t, vocab] -> f64[t, vocab]."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def compare(
    reference: Iterable[np.ndarray], engines: Mapping[str, Iterable[np.ndarray]], blocks: np.ndarray
) -> dict[str, Quality]:
    """Every engine against the reference, in one pass over it. blocks: i64[n, t]. reference and each engine give n
    times f32[t, vocab], the logits of one block after the other; ValueError where one gives fewer."""
    comparisons = {name: Comparison() for name in engines}
    for ids, expected, *found in zip(blocks, reference, *engines.values(), strict=True):
        for comparison, logits in zip(comparisons.values(), found, strict=True):
            comparison.add(expected, logits, ids)
    return {name: comparison.quality() for name, comparison in comparisons.items()}


def judge(
    quality: Quality,
    budget: QualityBudget,
    override: str | None = None,
    sanity_problem: str | None = None,
    *,
    spare: bool = False,
) -> Verdict:
    """Never raises; a quality that is not a number is beyond every budget. sanity_problem: ``sanity.problem``'s.

    spare: top-1 agreement must be one standard error above the budget, so that it would pass on other text as well.
    """
    problems = [] if sanity_problem is None else [f"on the sanity prompt {sanity_problem}"]
    if quality.non_finite:
        problems.append(f"logits are not finite at {quality.non_finite} of {quality.tokens} positions")
    problems += [problem for passed, problem in _bounds(quality, budget, spare) if not passed]
    return Verdict(not problems, tuple(problems), override if problems else None)


def _bounds(quality: Quality, budget: QualityBudget, spare: bool) -> list[tuple[bool, str]]:
    """Whether each bound is kept, and its sentence with measurement and budget."""
    agreement = quality.top1_agreement
    error = math.sqrt(agreement * (1 - agreement) / quality.tokens) if spare else 0.0
    more = f" and a standard error of {error:.2%} to spare" if spare else ""
    uniform = ": the reference itself takes all tokens for equally likely" if budget.kl < 1e-9 else ""
    perplexity = f"perplexity {quality.perplexity:.4g} is {quality.perplexity_ratio:.4g} times the reference's "
    perplexity += f"{quality.reference_perplexity:.4g} (at most {budget.perplexity_ratio:g} times)"
    top1 = f"the most likely token agrees at {agreement:.2%} of positions (at least {budget.top1_agreement:.2%}{more})"
    kl = f"KL divergence is {quality.kl:.4g} nats per token (at most {budget.kl:.4g}{uniform})"
    return [
        (quality.perplexity_ratio <= budget.perplexity_ratio, perplexity),
        (agreement >= budget.top1_agreement + error, top1),
        (quality.kl <= budget.kl, kl),
    ]


def doubts(quality: Quality, budget: QualityBudget) -> list[str]:
    """Return a sentence for each bound that is kept by the average over the text, and not by all of its interval."""
    found = []
    for name, (low, high) in quality.intervals.items():
        value, bound, worst = getattr(quality, name), getattr(budget, name), high
        if name == "top1_agreement":
            value, bound, worst = -value, -bound, -low
        if value < bound < worst:
            needed = quality.tokens * (((worst - value) / (bound - value)) ** 2 - 1)
            shown = f"{name} {abs(value):.4g} (95 %: {low:.4g} to {high:.4g}) keeps its budget {abs(bound):.4g}"
            found.append(f"{shown} on this text; about {math.ceil(needed)} more tokens would make it certain")
    return found


def gate(
    engine: str,
    quality: Quality,
    budget: QualityBudget,
    override: str | None = None,
    sanity_problem: str | None = None,
    *,
    spare: bool = False,
) -> Verdict:
    """``judge``'s verdict. Raises BeyondBudget for an engine beyond its budget, unless ``override`` says why it is
    packaged all the same; an empty reason is refused with InvalidArgument."""
    if override is not None and not override.strip():
        raise InvalidArgument("accept_quality", "must be a reason to use an engine beyond its budget, got an empty one")
    verdict = judge(quality, budget, override, sanity_problem, spare=spare)
    if not verdict.accepted:
        kept = [sentence for passed, sentence in _bounds(quality, budget, spare) if passed]
        within = f" Within budget, over {quality.tokens} tokens: {'; '.join(kept)}." if kept else ""
        problem = f"engine {engine} is not packaged: {'; '.join(verdict.problems)}.{within} Use more bits or more "
        problem += "calibration text, or set [quality] in a recipe. To publish it all the same, with the reason in its "
        problem += 'manifest: make build-engine ... ACCEPT_QUALITY="reason", or --accept-quality "reason".'
        raise BeyondBudget(problem, verdict)
    return verdict


def record(quality: Quality, budget: QualityBudget, verdict: Verdict) -> dict:
    """For the manifest: plain JSON, infinities as null."""
    numbers = asdict(quality)
    intervals = {key: list(bounds) for key, bounds in numbers.pop("intervals").items()}
    scores = {key: value if math.isfinite(value) else None for key, value in numbers.items()} | {"intervals": intervals}
    judged = asdict(verdict) | {"problems": list(verdict.problems)}
    return {"quality": scores, "budget": asdict(budget), "verdict": judged}


def table(rows: Sequence[tuple[str, Quality, float, Verdict]]) -> str:
    """Markdown. A row: name, quality, megabytes of weights, verdict."""
    perplexity = rows[0][1].reference_perplexity
    lines = [
        "| engine | weights MB | perplexity | ratio | top-1 agreement | KL nats/token | KL p99 | gate |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
        f"| reference (bf16 weights, f32 arithmetic) | | {perplexity:.3f} | 1 | 100% | 0 | 0 | |",
    ]
    for name, quality, megabytes, verdict in rows:
        word = "passed" if verdict.passed else "overridden" if verdict.accepted else "refused"
        lines.append(
            f"| {name} | {megabytes:.1f} | {quality.perplexity:.3f} | {quality.perplexity_ratio:.4f} | "
            f"{quality.top1_agreement:.2%} | {quality.kl:.5f} | {quality.kl_p99:.4f} | {word} |"
        )
    return "\n".join(lines)


def open_candidate(folder: Path) -> tuple[decoder.Decoder, int]:
    """Decoder and weight bytes of a checkpoint, TensorRT-LLM's or a Hugging Face one, quantised or not."""
    path = folder / "config.json"
    try:
        is_trtllm = "quantization" in json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise InvalidArgument("checkpoint", f"must be a checkpoint, got {folder}: {exc}") from exc
    if is_trtllm:
        checkpoint = trtllm_checkpoint.read(folder)
        return checkpoint.decoder(), checkpoint.weight_bytes
    if (folder / hf_quantised.QUANT_CONFIG).is_file():
        quantised = hf_quantised.read(folder)
        return quantised.decoder(), quantised.weight_bytes
    opened = open_checkpoint(folder)
    weight_bytes = sum(path.stat().st_size for path in {tensor.path for tensor in opened.tensors.values()})
    return decoder.from_checkpoint(opened), weight_bytes
