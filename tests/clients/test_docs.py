"""docs/clients.md names every argument, error and example there is."""

from __future__ import annotations

import re
from pathlib import Path

from clients.replica_set import picks
from clients.wire.arguments import ClientOptions, GenerateArguments
from contract import errors

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "clients.md").read_text("utf-8")


def table(heading: str) -> list[list[str]]:
    section = TEXT.partition(f"# {heading}\n")[2].partition("\n#")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[1:]]


def names(rows: list[list[str]]) -> set[str]:
    return {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}


def test_every_argument_is_in_a_table():
    assert names(table("Arguments of `generate` and `complete`")) == {"prompt", *GenerateArguments.__annotations__}
    options = names(table("Arguments of every client"))
    assert options == {"url", "replicas", "BalancedClient", *ClientOptions.__annotations__}


def test_the_table_of_errors_is_that_of_the_code():
    def subclasses(kind: type) -> set[type]:
        return {kind}.union(*(subclasses(sub) for sub in kind.__subclasses__()))

    shown = {row[0].strip("`"): row[1:4] for row in table("Errors")}
    kinds = {kind for kind in subclasses(errors.TridentError) if kind.__module__ == "contract.errors"}
    assert shown == {
        kind.__name__: [kind.grpc_status, str(kind.http_status), "yes" if kind.retryable else "no"]
        for kind in kinds - {errors.TridentError}
    }


def test_every_example_and_every_pick_is_named():
    for path in (ROOT / "examples").glob("*.py"):
        assert f"(../examples/{path.name})" in TEXT, path.name
    for name in picks.BY_NAME:
        assert f"`{name}`" in TEXT, name


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", TEXT):
        assert (ROOT / "docs" / target).exists(), target
