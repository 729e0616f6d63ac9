"""What drafts of prompt lookup would gain for sequences that decode without."""

from __future__ import annotations

import sys

import numpy as np


class PromptLookup:
    """Drafts of a sequence by OpenVINO GenAI's rule: what followed the first place in its text of its last tokens, of
    as many of them as occur before.

    ids: of prompt and answer so far. ngram_size: the most of them. length: draft tokens of a step.
    """

    def __init__(self, ids: np.ndarray, ngram_size: int, length: int) -> None:
        self._ngram_size, self._length = ngram_size, length
        # The first id of a prompt under a LoRA adapter may be larger (adapter_ids.py), and no other id is equal to it.
        self._text = "".join(map(chr, np.minimum(ids, sys.maxunicode).tolist()))
        self._accepted = 0
        self._draft = self._look_up()

    def add(self, id: int) -> int | None:
        """Take in the next token; return how many tokens the step that ends with it would have accepted, None where the
        step goes on."""
        token = chr(id)
        self._text += token
        if self._draft.startswith(token):
            self._draft = self._draft[1:]
            self._accepted += 1
            return None
        accepted, self._accepted = self._accepted, 0
        self._draft = self._look_up()
        return accepted

    def _look_up(self) -> str:
        for size in range(min(self._ngram_size, len(self._text) - 1), 0, -1):
            found = self._text.find(self._text[-size:], 0, len(self._text) - size)
            if found >= 0:
                return self._text[found + size :][: self._length]
        return ""
