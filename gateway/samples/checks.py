"""Checks of answers: what is wrong with one, and how far a model's answers have drifted. They keep counts, no text."""

from __future__ import annotations

import json
import math
import re
import time
import unicodedata
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NoReturn

import jsonschema_rs

from contract.generation import Guide
from gateway.config.samples import CheckRules

FINDINGS = ("ok", "empty", "schema", "loop", "refusal")
FEATURES = ("length", "language", "finding")
MAX_SERIES = 200  # models and pools
_READ_CHARS = 2000  # of an answer, for its language
_REFUSAL_CHARS = 500
_LOOP_CHARS, _LOOP_TIMES, _LOOP_PERIOD = 48, 4, 300  # a loop ends the answer, repeats so often, and spans so much
_SCRIPTS = {"CJK": "han", "HIRAGANA": "kana", "KATAKANA": "kana"} | {
    name: name.lower() for name in ("LATIN", "CYRILLIC", "GREEK", "ARABIC", "HEBREW", "DEVANAGARI", "THAI", "HANGUL")
}
_WORDS = {
    "en": "the and of to is that in it you for with are this was",
    "de": "der die und ist das nicht ein eine zu den mit von sich auf",
    "fr": "le les et est que des une pour dans vous pas sur qui du",
    "es": "el los y es en una por con para las se del como más",
    "it": "il che di è per non sono gli della un le più alla anche",
    "pt": "o não uma os é do da em um as mais ao são também",
    "nl": "de het een van niet dat op te zijn voor ook aan met er",
}
_LANGUAGE_OF: dict[str, list[str]] = {}
for _language, _frequent in _WORDS.items():
    for _word in _frequent.split():
        _LANGUAGE_OF.setdefault(_word, []).append(_language)


@lru_cache(maxsize=4096)
def _script(letter: str) -> str:
    return _SCRIPTS.get(unicodedata.name(letter, "").partition(" ")[0], "other") if letter.isalpha() else ""


def language(text: str) -> str:
    """Return the language by frequent words where the letters are Latin, else the script; "none" without letters."""
    text = text[:_READ_CHARS]
    scripts = Counter(map(_script, text))
    scripts["kana"] *= 4  # Japanese writes both
    del scripts[""]
    if not +scripts:
        return "none"
    script = max(scripts, key=lambda name: scripts[name])
    votes = Counter(one for word in re.findall(r"[^\W\d_]+", text.lower()) for one in _LANGUAGE_OF.get(word, ()))
    return votes.most_common(1)[0][0] if script == "latin" and votes.total() >= 3 else script


def loops(text: str) -> bool:
    """Return whether the text ends in a passage that is repeated over and over."""
    tail = text[-_LOOP_PERIOD * _LOOP_TIMES :]
    for period in range(1, min(_LOOP_PERIOD, len(tail) // _LOOP_TIMES) + 1):
        times = max(_LOOP_TIMES, math.ceil(_LOOP_CHARS / period))
        passage = tail[-period:]
        if tail.endswith(passage * times) and any(map(str.isalnum, passage)):
            return True
    return False


def finding(text: str, guide: Guide | None, refusals: Sequence[re.Pattern[str]]) -> str:
    """Return the first of FINDINGS that holds for an answer. guide: what it had to match."""
    if not text.strip():
        return "empty"
    if guide is not None and not _matches(text, guide):
        return "schema"
    if loops(text):
        return "loop"
    return "refusal" if any(pattern.search(text[:_REFUSAL_CHARS]) for pattern in refusals) else "ok"


def _matches(text: str, guide: Guide) -> bool:
    """Return whether an answer matches; True for the kinds that are not checked."""
    if guide.kind not in ("json", "json_schema", "choice"):
        return True
    try:
        if guide.kind == "choice":
            return text in json.loads(guide.text)
        value = json.loads(text)
        return isinstance(value, dict) if guide.kind == "json" else _validator(guide.text).is_valid(value)
    except (ValueError, RecursionError):
        return False


@lru_cache(maxsize=32)
def _validator(schema: str) -> jsonschema_rs.Validator:
    """Return the validator of a schema: its patterns take linear time, and it loads nothing from elsewhere."""
    try:
        options = jsonschema_rs.RegexOptions()
        return jsonschema_rs.validator_for(schema, retriever=_nothing, pattern_options=options)
    except ValueError:
        return jsonschema_rs.validator_for(True)  # the engine's checker knew more than this one


def _nothing(uri: str) -> NoReturn:
    raise ValueError(f"{uri} is not loaded")


def psi(recent: Counter, baseline: Counter) -> float:
    """Return the population stability index of two histograms, less what two draws of one distribution are apart."""
    kinds = recent.keys() | baseline.keys()
    sizes = [counts.total() for counts in (recent, baseline)]
    total = 0.0
    for kind in kinds:
        p, q = (
            (counts[kind] + 0.5) / (size + 0.5 * len(kinds))
            for counts, size in zip((recent, baseline), sizes, strict=True)
        )
        total += (p - q) * math.log(p / q)
    return max(0.0, total - (len(kinds) - 1) * sum(1 / size for size in sizes))


class Drift:
    """Compares each model's answers at each pool in a window with those of the windows before it.

    A window without an answer does not count. rules: changed at any time.
    """

    def __init__(self, rules: CheckRules, clock: Callable[[], float] = time.monotonic) -> None:
        self.rules, self._clock = rules, clock
        self._series: dict[tuple[str, str], _Series] = {}

    def add(self, model: str, pool: str, tokens: int, language: str, finding: str) -> None:
        key = (model, pool)
        if key in self._series or len(self._series) < MAX_SERIES:
            counts = self._series.setdefault(key, _Series(self._clock())).now(self._clock(), self.rules.window_s)
            for counter, value in zip(counts, (tokens.bit_length(), language, finding), strict=True):
                counter[value] += 1

    def scores(self) -> Iterator[tuple[str, str, str, float]]:
        """Yield (model, pool, feature, index) where there are enough answers."""
        for (model, pool), series in self._series.items():
            windows = [*series.past, series.now(self._clock(), self.rules.window_s)][-self.rules.windows - 2 :]
            if windows[-1][0].total() < self.rules.min_answers:
                windows.pop()
            for place, feature in enumerate(FEATURES):
                recent, baseline = Counter[object](), Counter[object]()
                for window in windows[-1:]:
                    recent += window[place]
                for window in windows[:-1][-self.rules.windows :]:
                    baseline += window[place]
                if min(recent.total(), baseline.total()) >= self.rules.min_answers:
                    yield model, pool, feature, psi(recent, baseline)


class _Series:
    """The windows of one model at one pool, each a histogram by feature. began_s: of the current one."""

    def __init__(self, now_s: float) -> None:
        self._began_s = now_s
        self.past: deque[tuple[Counter, ...]] = deque(maxlen=169)
        self._current = tuple(Counter[object]() for _ in FEATURES)

    def now(self, now_s: float, window_s: float) -> tuple[Counter, ...]:
        """Return the current window, a new one where the last has ended."""
        if now_s >= self._began_s + window_s and self._current[0]:
            self.past.append(self._current)
            self._current = tuple(Counter[object]() for _ in FEATURES)
            self._began_s = now_s
        elif not self._current[0]:
            self._began_s = now_s
        return self._current
