"""Cut the deltas of a response's choices into text, tool calls and reasoning."""

from __future__ import annotations

import hashlib
from functools import partial

from gateway.api.vocabulary import Vocabulary
from gateway.choices import ChoiceDelta, ChoiceDeltas
from gateway.tools.chat_format import MISTRAL
from gateway.tools.cutter import Cutter, CutterRules

_MISTRAL_ID_LENGTH = 9  # Mistral's templates take no other


class ChoiceCutters:
    """The cutters of one response, made as its choices begin.

    response_id: a response that is sent again has the same, and then its calls have the same ids.
    """

    def __init__(self, rules: CutterRules, vocabulary: Vocabulary, response_id: str) -> None:
        self._rules, self._vocabulary, self._response_id = rules, vocabulary, response_id
        self._cutters: dict[int, Cutter] = {}

    def cut(self, item: ChoiceDelta) -> ChoiceDelta:
        choice, delta = item
        cutter = self._cutters.get(choice)
        if cutter is None:
            cutter = Cutter(self._rules, self._vocabulary, partial(self._call_id, choice))
            self._cutters[choice] = cutter
        return ChoiceDelta(choice, cutter.feed(delta))

    def _call_id(self, choice: int, call: int) -> str:
        digest = hashlib.sha256(f"{self._response_id}/{choice}/{call}".encode()).hexdigest()
        return digest[:_MISTRAL_ID_LENGTH] if self._rules.format.tools == MISTRAL else f"call_{digest[:24]}"


class CutDeltas:
    """The deltas of a response, cut. Closing it closes them."""

    def __init__(self, deltas: ChoiceDeltas, cutters: ChoiceCutters) -> None:
        self._deltas, self._cutters = deltas, cutters

    def __aiter__(self) -> CutDeltas:
        return self

    async def __anext__(self) -> ChoiceDelta:
        return self._cutters.cut(await anext(self._deltas))

    async def aclose(self) -> None:
        await self._deltas.aclose()
