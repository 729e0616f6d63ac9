"""Choose the model of a request: the packed ensemble for streams where the server has it, unless the caller names one.

The server is asked beside a request, which does not wait for the answer, and again beside later ones.
"""

from __future__ import annotations

import time

from clients.wire.connection import DEFAULT_MODEL
from contract import packed_delta
from contract.errors import NotFound, TridentError, Unavailable

ASK_AGAIN_S = 60.0  # an idle connection does not show that the server was replaced
ASK_AFTER_ERROR_S = 1.0
ASK_TIMEOUT_S = 5.0


class PackedEnsemble:
    """Whether one server has the packed ensemble: ``ready`` is its latest answer. Safe for threads."""

    def __init__(self) -> None:
        self.ready = False
        self._ask_at_s = 0.0

    def due(self) -> bool:
        """Return whether the server is to be asked now, which is the caller's part."""
        now_s = time.monotonic()
        if now_s < self._ask_at_s:
            return False
        self._ask_at_s = now_s + ASK_AGAIN_S
        return True

    def failed(self) -> None:
        """Take note that the server could not serve a request: another one may have taken its place."""
        self.ready = False
        self._ask_at_s = min(self._ask_at_s, time.monotonic() + ASK_AFTER_ERROR_S)


class StreamModel:
    """The model that each attempt of one request goes to."""

    def __init__(self, named: str | None, stream: bool) -> None:
        """named: by the caller, who gets that one. stream: whether the request is one."""
        self._model, self.chooses = named or DEFAULT_MODEL, stream and not named
        self._packed: PackedEnsemble | None = None  # of the latest attempt
        self._sent_packed = False

    def at(self, packed: PackedEnsemble) -> str:
        """Return the model for the next attempt, at the server that ``packed`` is about."""
        self._packed, self._sent_packed = packed, self.chooses and packed.ready
        return packed_delta.MODEL if self._sent_packed else self._model

    def refused(self, error: TridentError) -> bool:
        """Take note of an attempt's error; return whether its server only lacked the packed ensemble: nothing ran."""
        if self._packed is None or not isinstance(error, NotFound | Unavailable):
            return False
        self._packed.failed()
        # Triton's word for a model that was unloaded is Unavailable, with the name.
        lacking = self._sent_packed and (isinstance(error, NotFound) or packed_delta.MODEL in str(error))
        self.chooses = self.chooses and not lacking
        return lacking
