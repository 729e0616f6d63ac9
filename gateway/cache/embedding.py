"""The embedding model beside the event loop: one thread, a bounded line before it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from contract.errors import InvalidArgument

if TYPE_CHECKING:
    from gateway.cache.sentence_encoder import SentenceEncoder

FILES = ("config.json", "model.safetensors", "tokenizer.json", "sentence_bert_config.json", "1_Pooling/config.json")
MAX_WAITING = 64
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
Result = TypeVar("Result")


class NoResult(Exception):
    """The line is full, or the model failed."""


class EmbeddingThread:
    """Runs calls of an encoder, one after the other."""

    def __init__(self, encoder: SentenceEncoder) -> None:
        self.encoder = encoder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embedding")
        self._waiting = 0

    async def run(self, call: Callable[[SentenceEncoder], Result]) -> Result:
        """``call(encoder)`` in the thread. Raises NoResult. Cancelled before its turn, it never runs."""
        if self._waiting >= MAX_WAITING:
            raise NoResult
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call, self.encoder)
        except RuntimeError as exc:  # OpenVINO's, or the thread is closed
            raise NoResult from exc
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Takes no more calls; the one that runs is waited for, the others are dropped."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def model_folder(model: str) -> Path:
    """A folder as it is, or a hub id such as ``owner/name``, downloaded into the hub's own cache.

    Raises InvalidArgument ``model`` when there is no such folder or the hub does not give it.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if not _HUB_ID.fullmatch(model):
        raise InvalidArgument("model", f"there is no folder {model}, and it is no hub id (owner/name)")
    import huggingface_hub  # only those whose model is not here yet need it
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=list(FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as exc:
        raise InvalidArgument("model", f"the hub does not give {model}: {str(exc).splitlines()[0]}") from exc
