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
from gateway.config.samples import MAX_WINDOWS, CheckRules

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
    sizes, total = (recent.total(), baseline.total()), 0.0
    for kind in kinds:
        p = (recent[kind] + 0.5) / (sizes[0] + 0.5 * len(kinds))
        q = (baseline[kind] + 0.5) / (sizes[1] + 0.5 * len(kinds))
        total += (p - q) * math.log(p / q)
    return max(0.0, total - (len(kinds) - 1) * sum(1 / size for size in sizes))


class Drift:
    """Compares each model's answers at each pool in a window with those before. It begins with its first answer."""

    def __init__(self, rules: CheckRules, clock: Callable[[], float] = time.monotonic) -> None:
        self.rules, self._clock = rules, clock
        # by model and pool: the beginning of each window, and its histograms by feature
        self._windows: dict[tuple[str, str], deque[tuple[float, tuple[Counter, ...]]]] = {}

    def add(self, model: str, pool: str, tokens: int, language: str, finding: str) -> None:
        if (model, pool) not in self._windows and len(self._windows) >= MAX_SERIES:
            return
        now_s, windows = self._clock(), self._windows.setdefault((model, pool), deque(maxlen=MAX_WINDOWS + 2))
        if not windows or now_s >= windows[-1][0] + self.rules.window_s:
            windows.append((now_s, (Counter(), Counter(), Counter())))
        for counter, value in zip(windows[-1][1], (tokens.bit_length(), language, finding), strict=True):
            counter[value] += 1

    def scores(self) -> Iterator[tuple[str, str, str, float]]:
        """Yield (model, pool, feature, index) where there are enough answers; forget what has had none for long."""
        least, oldest_s = self.rules.min_answers, self._clock() - (self.rules.windows + 1) * self.rules.window_s
        self._windows = {series: known for series, known in self._windows.items() if known[-1][0] >= oldest_s}
        for (model, pool), known in self._windows.items():
            windows = [counts for _, counts in known]
            if windows[-1][0].total() < least:
                windows.pop()
            for place, feature in enumerate(FEATURES):
                *earlier, recent = [Counter[object](), *(window[place] for window in windows)]
                baseline = sum(earlier[-self.rules.windows :], Counter[object]())
                if min(recent.total(), baseline.total()) >= least:
                    yield model, pool, feature, psi(recent, baseline)
