"""A secret in a file that may be replaced while the gateway runs, as mounted vaults do."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from contract.errors import InvalidArgument

CHECK_S = 0.5
_LOG = logging.getLogger(__name__)


class SecretFile:
    """Keep what ``read`` returns and call it again every CHECK_S at most; the last secret stays where it fails.

    Raises: what ``read`` raises, at first.
    """

    def __init__(self, read: Callable[[], bytes]) -> None:
        self._read, self._problem = read, ""
        self._secret, self._read_s = read(), time.monotonic()

    @property
    def secret(self) -> bytes:
        """The secret as of CHECK_S ago at most."""
        now_s = time.monotonic()
        if now_s - self._read_s >= CHECK_S:
            self._read_s = now_s
            try:
                self._secret, self._problem = self._read(), ""
            except InvalidArgument as error:
                if str(error) != self._problem:
                    _LOG.error("the secret stays as it was: %s", error)
                self._problem = str(error)
        return self._secret
