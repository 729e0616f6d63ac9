"""What the docs quote, list and link exists in the source."""

from __future__ import annotations

import importlib.util
import json
import re
from functools import cache
from pathlib import Path

import pytest

from contract import tensors

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PACKAGES = ("contract", "python_backends", "server", "clients", "gateway", "build")
PAGES = sorted([*DOCS.glob("*.md"), *(DOCS / "decisions").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


@cache
def _module_map():
    spec = importlib.util.spec_from_file_location("module_map", DOCS / "module_map.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_map_of_modules_is_that_of_the_source():
    written = (DOCS / "modules.md").read_text("utf-8")
    assert written == _module_map().page(), "run .venv/bin/python docs/module_map.py"


def test_every_module_says_what_it_does():
    modules = _module_map()
    for package in modules.PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            assert modules.summary(path), path.relative_to(ROOT)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_message_of_the_troubleshooting_page_is_in_the_source():
    sources = "\n".join(path.read_text("utf-8") for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    # Neighbouring literals are one message: the quotes between them go.
    joined = re.sub(r'"\s*\n\s*f?"', "", sources)
    rows = re.findall(r"^\| (.+?) \|", (DOCS / "troubleshooting.md").read_text("utf-8"), re.MULTILINE)
    quoted = [message for row in rows for message in re.findall(r"`([^`]+)`", row) if " " in message]
    checked = 0
    for message in quoted:
        if "JSON non-string" in message or message.startswith("InvalidArgument: <field>"):
            continue  # Triton's own words; the form of all our errors
        for part in message.split("…"):
            text = re.sub(r"^(Unavailable|Overloaded|EngineFailed|DeadlineExceeded): ", "", part).strip()
            if len(text) >= 8:
                checked += 1
                assert text in joined, f"no source says {text!r}"
    assert checked > 15


def test_the_migration_page_names_every_tensor_of_both_ensembles():
    page = (DOCS / "migration.md").read_text("utf-8")
    theirs = json.loads((ROOT / "build" / "trtllm" / "triton_contract_1.x.json").read_text("utf-8"))["ensemble"]
    names = {tensor["name"] for side in ("inputs", "outputs") for tensor in theirs[side]}
    names |= {tensor.name for tensor in (*tensors.ENSEMBLE_INPUTS, *tensors.ENSEMBLE_OUTPUTS)}
    missing = sorted(name for name in names if f"`{name}`" not in page)
    assert not missing, missing


def test_decisions_are_numbered_without_gaps_and_all_in_the_index():
    files = sorted((DOCS / "decisions").glob("[0-9]*.md"))
    assert [int(file.name[:4]) for file in files] == list(range(1, len(files) + 1))
    index = (DOCS / "decisions" / "README.md").read_text("utf-8")
    for file in files:
        title = file.read_text("utf-8").splitlines()[0].removeprefix("# ")
        assert f"[{title}]({file.name})" in index, file.name
        assert title.startswith(file.name[:4]), file.name
