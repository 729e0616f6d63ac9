import pytest

from build.base import hardware, shape
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


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("H100", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA L40S", "l40s"),
        ("a100", "a100-80gb"),
        ("RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("h100-sxm", "h100"),
    ],
)
def test_cards_are_found_by_the_names_people_and_drivers_use(name, card):
    assert hardware.find(name).name == card


def test_only_a_card_of_the_table_is_known():
    assert hardware.known("l4") and not hardware.known("h201")


def test_every_compute_capability_has_cards_formats_and_an_offer_that_it_supports():
    assert {card.sm for card in hardware.CARDS.values()} == set(hardware.SMS)
    for sm in hardware.SMS:
        assert hardware.reference(sm).sm == sm
        for weights, kv in hardware.OFFERED[sm]:
            assert weights in hardware.SUPPORT[sm] and kv in hardware.KV_SUPPORT[sm]


def test_the_support_matrix_is_that_of_the_documentation():
    assert hardware.supporting("fp8") == (89, 90, 100, 103, 120)
    assert hardware.supporting("int4_awq") == (80, 86, 89, 90)
    assert hardware.supporting("w4a8_awq") == (89, 90)
    assert hardware.supporting("fp8_pc_pt") == (90,)
    assert hardware.supporting("nvfp4") == (100, 103, 120)
    assert hardware.supporting("bf16") == hardware.SMS


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """A function that puts a program of that name into the way, which runs a line of shell."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def write(line: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    return write


def test_cards_of_this_machine_are_read_from_the_drivers_table(nvidia_smi):
    nvidia_smi(r"printf 'NVIDIA H100 80GB HBM3, 9.0\nNVIDIA L4, 8.9\n'")
    assert hardware.present() == [("NVIDIA H100 80GB HBM3", 90), ("NVIDIA L4", 89)]
    assert hardware.find("NVIDIA H100 80GB HBM3").name == "h100"


@pytest.mark.parametrize("line", ["true", "echo No devices were found", "echo 'x, [N/A]'", "exit 9"])
def test_a_driver_without_cards_gives_none(nvidia_smi, line):
    nvidia_smi(line)
    assert hardware.present() == []


def test_a_machine_without_the_tool_has_none(nvidia_smi):
    assert hardware.present() == []


def written(root, total_kb: int | None, limit: str | None) -> int | None:
    for name, text in (("proc/meminfo", f"MemTotal: {total_kb} kB\n"), ("sys/fs/cgroup/memory.max", limit)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if text is not None and total_kb is not None:
            (root / name).write_text(text)
    return hardware.memory_bytes(root)


@pytest.mark.parametrize(
    ("total_kb", "limit", "expected"),
    [(1000, None, 1_024_000), (1000, "max\n", 1_024_000), (1000, "4096\n", 4096), (None, None, None)],
)
def test_it_is_the_machines_or_the_containers(tmp_path, total_kb, limit, expected):
    assert written(tmp_path, total_kb, limit) == expected


def test_this_machine_says_it():
    assert hardware.memory_bytes() > 2**28


def test_a_pool_beyond_the_machine_is_refused_with_what_fits():
    made, arch = recipes.parse(TABLE, "tiny.toml"), shape.find(MODEL)
    need = memory.footprint(made, arch.architecture).total_bytes
    assert not refused(judge(Case(made, arch, memory_here=need)))
    (found,) = [f for f in judge(Case(made, arch, memory_here=need - 1)) if f.rule == "C5"]
    assert "65536 tokens of KV cache take" in found.reason and "kv_cache_tokens up to 65504 fit" in found.reason
    assert "its weights alone do not fit" in judge(Case(made, arch, memory_here=1000))[0].reason
    assert not refused(judge(Case(made, arch)))  # planned without a machine


def test_the_plan_looks_at_this_machine(monkeypatch):
    monkeypatch.setattr(hardware, "memory_bytes", lambda: 1000)
    assert plan.make(recipes.parse(TABLE, "tiny.toml"), shape.find(MODEL)).refused
