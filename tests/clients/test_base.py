"""What every client has in common."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from clients import NO_RETRY, AsyncClient, BalancedClient, Client, RetryBudget, replica_set, wire
from contract.errors import Cancelled, InvalidArgument
from tests.fakes.replica import FakeReplica, Script

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = (Client, AsyncClient, BalancedClient)


@pytest.mark.parametrize("kind", CLIENTS)
def test_every_client_takes_the_same_options_and_no_others(kind: type):
    made = kind("127.0.0.1:1", model="m", tls=None, api_key="k", metadata={"a": "b"}, retry=NO_RETRY, rng=None)
    assert made.model == "m"
    with pytest.raises(TypeError, match="unexpected keyword argument 'modell'"):
        kind("127.0.0.1:1", modell="m")


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": 5}, "model: must be text, got 5"),
        ({"retry": 3}, "retry: must be a RetryPolicy, got 3"),
        ({"retry": 0}, "retry: must be a RetryPolicy, got 0"),
        ({"budget": 3}, "budget: must be a RetryBudget, got 3"),
        ({"rng": 3}, "rng: must be a random.Random, got 3"),
        ({"metadata": None}, "metadata: must be a dict, or pairs of a name and a value, got NoneType"),
        ({"metadata": [("a", "b", "c")]}, "metadata: must be a dict, or pairs of a name and a value, got list"),
    ],
)
def test_an_option_of_another_kind_is_refused_by_name(kind: type, options: dict, message: str):
    with pytest.raises(InvalidArgument, match=message):
        kind("127.0.0.1:1", **options)


@pytest.mark.parametrize("kind", CLIENTS)
async def test_a_bad_argument_of_generate_is_raised_before_anything_is_sent(kind: type):
    client = kind("127.0.0.1:1", budget=RetryBudget())
    with pytest.raises(InvalidArgument, match="did you mean temperature"):
        client.generate("x", temprature=1.0)


async def test_closing_a_client_cancels_the_streams_that_were_sent_and_no_others():
    async with FakeReplica(lambda _: Script(("a", "b"), stall_after=1)) as replica:
        client = AsyncClient(replica.url)
        sent, unsent = client.generate("x"), client.generate("y")
        assert (await anext(sent)).text == "a"
        await client.close()
        with pytest.raises(Cancelled):
            await sent.complete()
        assert (await anext(unsent)).text == "a"  # the channel opens again
        await client.close()


@pytest.mark.slow
def test_other_packages_use_public_names_of_the_clients_only():
    for package in ("gateway", "server", "benchmarks", "examples"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "clients":
                    assert not [alias.name for alias in node.names if alias.name.startswith("_")], path


@pytest.mark.parametrize("package", [wire, replica_set])
def test_every_module_is_documented_in_its_package(package):
    for path in Path(package.__path__[0]).glob("[a-z]*.py"):
        assert f"``{path.stem}``" in package.__doc__, path.stem
