"""Where a model comes from, and what its thread does with calls that nobody waits for any more."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from contract.errors import InvalidArgument
from gateway.cache.embedding import EmbeddingThread, NoResult, model_folder
from gateway.cache.sentence_encoder import SentenceEncoder
from tests.fakes import hub
from tests.gateway import tiny_bert

ROOT = Path(__file__).parents[3]


def test_a_folder_is_taken_as_it_is_and_a_wrong_name_refused(tmp_path: Path) -> None:
    assert model_folder(str(tmp_path)) == tmp_path
    with pytest.raises(InvalidArgument, match="model: there is no folder ../no, and it is no hub id"):
        model_folder("../no")


@pytest.mark.slow
def test_a_hub_id_is_downloaded_with_what_an_encoder_needs_and_no_more(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    model = tmp_path / "model"
    model.mkdir()
    tiny_bert.write(model, longest=30, pooling={"pooling_mode_mean_tokens": True})
    files = {str(path.relative_to(model)): path.read_bytes() for path in model.rglob("*") if path.is_file()}
    with hub.serving("owner/tiny", files | {"pytorch_model.bin": b"x"}) as (endpoint, downloaded):
        found, missing = (asked_of_hub(endpoint, tmp_path, name) for name in ("owner/tiny", "owner/none"))
    assert sorted(downloaded) == sorted(files)
    assert SentenceEncoder(Path(found)).shape.max_tokens == 30
    assert missing.startswith("model: the hub does not give owner/none: ")


def asked_of_hub(endpoint: str, home: Path, name: str) -> str:
    """What ``model_folder`` says in a process of its own: huggingface_hub reads its settings when it is imported."""
    script = """
import sys
from contract.errors import InvalidArgument
from gateway.cache.embedding import model_folder
try:
    print(model_folder(sys.argv[1]))
except InvalidArgument as error:
    print(error)
"""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environ |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home / "hub"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, name], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


async def test_a_call_that_was_left_before_its_turn_is_never_made() -> None:
    thread = EmbeddingThread(None)  # type: ignore[arg-type]
    gate, made = threading.Event(), []
    first = asyncio.ensure_future(thread.run(lambda encoder: gate.wait(30)))
    left = asyncio.ensure_future(thread.run(lambda encoder: made.append("left")))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    gate.set()
    assert await first and await thread.run(lambda encoder: made.append("last")) is None
    assert made == ["last"]
    thread.close()
    with pytest.raises(NoResult):
        await thread.run(lambda encoder: made.append("closed"))
