"""How much memory an engine may take on this machine."""

import pytest

from build.base import host, shape
from build.package import plan
from build.recipe import memory
from build.recipe import recipe as recipes
from build.recipe.case import Case
from build.recipe.verdict import judge, refused

MODEL = "build/demo_model/checkpoint"
TABLE = {
    "kind": "cpu",
    "model": MODEL,
    "precision": "bf16",
    "max_batch_size": 8,
    "max_num_tokens": 64,
    "max_seq_len": 1024,
    "kv_cache_tokens": 65536,
}


def written(root, total_kb: int | None, limit: str | None) -> int | None:
    for name, text in (("proc/meminfo", f"MemTotal: {total_kb} kB\n"), ("sys/fs/cgroup/memory.max", limit)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if text is not None and total_kb is not None:
            (root / name).write_text(text)
    return host.memory_bytes(root)


@pytest.mark.parametrize(
    ("total_kb", "limit", "expected"),
    [(1000, None, 1_024_000), (1000, "max\n", 1_024_000), (1000, "4096\n", 4096), (None, None, None)],
)
def test_it_is_the_machines_or_the_containers(tmp_path, total_kb, limit, expected):
    assert written(tmp_path, total_kb, limit) == expected


def test_this_machine_says_it():
    assert host.memory_bytes() > 2**28


def test_a_pool_beyond_the_machine_is_refused_with_what_fits():
    made, arch = recipes.parse(TABLE, "tiny.toml"), shape.find(MODEL)
    need = memory.footprint(made, arch.architecture).total_bytes
    assert not refused(judge(Case(made, arch, memory_here=need)))
    (found,) = [f for f in judge(Case(made, arch, memory_here=need - 1)) if f.rule == "C5"]
    assert "65536 tokens of KV cache take" in found.reason and "kv_cache_tokens up to 65504 fit" in found.reason
    assert "its weights alone do not fit" in judge(Case(made, arch, memory_here=1000))[0].reason
    assert not refused(judge(Case(made, arch)))  # planned without a machine


def test_the_plan_looks_at_this_machine(monkeypatch):
    monkeypatch.setattr(host, "memory_bytes", lambda: 1000)
    assert plan.make(recipes.parse(TABLE, "tiny.toml"), shape.find(MODEL)).refused
