import pytest

from build.base import hardware


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
    nvidia_smi(r"printf 'NVIDIA H100 80GB HBM3, 9.0, 81559, 590.44.01\nNVIDIA L4, 8.9, 23034, 590.44.01\n'")
    cards = hardware.present()
    assert [(card.sm, card.driver) for card in cards] == [(90, "590.44.01"), (89, "590.44.01")]
    assert cards[0].memory_gib == pytest.approx(79.6, abs=0.1)
    assert hardware.find(cards[0].name).name == "h100"


@pytest.mark.parametrize("line", ["true", "echo No devices were found", "echo 'x, [N/A], [N/A], 1'", "exit 9"])
def test_a_driver_without_cards_gives_none(nvidia_smi, line):
    nvidia_smi(line)
    assert hardware.present() == []


def test_a_machine_without_the_tool_has_none(nvidia_smi):
    assert hardware.present() == []
