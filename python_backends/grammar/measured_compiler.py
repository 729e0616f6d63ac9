"""A grammar is compiled before the engine does, and refused if that, or one of its tokens, takes too long."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from statistics import linear_regression, mean, pvariance

from contract.errors import InvalidArgument
from contract.generation import Guide
from python_backends.grammar.checker import Check, costly
from python_backends.grammar.translation import translate

_WALK_TOKENS, _WALK_S = 48, 0.4
_LONG_WALK_TOKENS, _LONG_WALK_S = 192, 0.8
_END_TOKENS = 8  # whose mean is the cost at the end of the long walk
# That the library's compiler makes use of, as many as this process may.
COMPILING_CORES = min(4, len(os.sched_getaffinity(0)))
_FEWEST_TO_GROW = 6  # tokens of a walk whose second half can tell a slope from chance
_SURE = 3.0  # standard errors
_STEPS_A_STALL = 3  # every token of a grammar may cost only a part of what compiling it once may


Walk = tuple[float, list[float]]  # seconds of the CPU for compiling, and for each token


class MeasuredCompiler:
    """A library that compiles grammars, with the engine's vocabulary."""

    def __init__(self, special: Sequence[str]) -> None:
        """special: the texts of the special tokens that are marked in the vocabulary (vocabulary.py)."""
        self._special = special

    def walk(self, guide: Guide, requested: Check, tokens: int, most_s: float, again: bool) -> Walk:
        """Compile a guide and walk through it at random; return what it took.

        tokens, most_s: where the walk ends. So it does if compiling took longer than ``requested.stall_s``.
        again: the guide was compiled by the call before; the walk prefers ids that it had.
        Raises RuntimeError, UnicodeDecodeError: it does not compile.
        """
        raise NotImplementedError

    def check(self, requested: Check) -> Guide | InvalidArgument:
        """Translate and compile a guide, and walk through it; return the translation, or why it is refused."""
        try:
            guide = translate(requested.guide, self._special)
            compiling_s, steps = self.walk(guide, requested, _WALK_TOKENS, _WALK_S, again=False)
            longer: list[float] = []
            if compiling_s <= requested.stall_s:
                # A walk at random ends soon where every second text may end, so this one goes on while it can: the end
                # is no id that it had. What an ambiguous grammar costs grows with every token.
                _, longer = self.walk(guide, requested, _LONG_WALK_TOKENS, _LONG_WALK_S, again=True)
        except InvalidArgument as exc:
            return exc
        except (RuntimeError, UnicodeDecodeError) as exc:
            # The library cuts what it says at a byte, within a character too.
            message = exc.object.decode(errors="replace") if isinstance(exc, UnicodeDecodeError) else str(exc)
            reason = " ".join(message.strip().splitlines()[-1].split("] ")[-1].split(": ", 1)[-1].split())
            return InvalidArgument("guided_decoding_guide", f"must be a grammar that compiles: {reason[:300]}")
        token_s = max(mean(steps or [0.0]), _at_end(longer))
        limits = (("compiling it", compiling_s, 1), ("a token", token_s, _STEPS_A_STALL))
        for what, held_s, part in limits:
            if held_s > (most_s := requested.stall_s / part):
                cost = f"must not hold up other requests: {what} takes {held_s:.2g} s, the limit is {most_s:.2g} s"
                most = "repetition with a large limit, many optional properties, and ambiguity"
                return costly(f"{cost}; what costs most is {most}")
        return guide


def _at_end(longer: Sequence[float]) -> float:
    """Return the seconds of the last token of a long walk. One that was cut off is taken to go on as it grew."""
    if not longer:
        return 0.0
    if sum(longer) < _LONG_WALK_S or len(longer) < _FEWEST_TO_GROW:
        return mean(longer[-_END_TOKENS:])
    half = longer[len(longer) // 2 :]
    return mean(half) + _growth_s(half) * (_LONG_WALK_TOKENS - len(longer) + len(half) / 2)


def _growth_s(steps: Sequence[float]) -> float:
    """Return by how much the seconds of a token grow from one to the next, at least: the slope less _SURE errors. A
    bounded text costs more and more up to the end of a block, then little: few tokens have a slope by chance."""
    places = range(len(steps))
    slope, intercept = linear_regression(places, steps)
    left = sum((step - intercept - slope * place) ** 2 for place, step in zip(places, steps, strict=True))
    error = math.sqrt(left / (len(steps) - 2) / (len(steps) * pvariance(places)))
    return max(0.0, slope - _SURE * error)
