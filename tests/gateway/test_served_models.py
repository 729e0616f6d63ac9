"""The table of models that is served, and what is checked before it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract.errors import InvalidArgument
from gateway import served_models
from gateway.config.policy import ModelRules, Policy
from gateway.config.pools import Pools
from gateway.config.settings import Settings

POOLS = Pools({"big": "a:1", "vectors": "b:1"}, encoders=frozenset({"vectors"}))


def test_what_the_file_leaves_out_of_a_model_is_that_of_its_pools(tmp_path: Path) -> None:
    settings = Settings(replicas="big=a:1;vectors=b:1", encoders=("vectors",), models={"big": str(tmp_path / "t")})
    policy = Policy(models={"chat": ModelRules(pools=("big",)), "find": ModelRules(pools=("vectors",))})
    found = served_models.table(settings, policy, POOLS)
    assert (found["chat"].tokenizer, found["chat"].capabilities) == (tmp_path / "t", None)
    assert (found["find"].tokenizer, found["find"].capabilities) == (None, served_models.ENCODES)
    assert list(served_models.table(settings, Policy(), POOLS)) == ["big"]
    with pytest.raises(InvalidArgument, match="^models.chat.tokenizer: must be a tokenizer.json"):
        served_models.check(settings, policy, POOLS)
