from __future__ import annotations

import pytest

from clients.replica_set import discovery
from clients.replica_set.discovery import Dns, File, Static
from contract.errors import InvalidArgument, Unavailable


async def test_a_static_list_is_cleaned_and_sorted() -> None:
    assert await Static([" b:2", "a:1", "b:2 ", "c"]).replicas() == ("a:1", "b:2", "c:8001")
    assert await Static(["[::1]:9", "[::1]"]).replicas() == ("[::1]:8001", "[::1]:9")


@pytest.mark.parametrize(
    "url", ["a:0", "a:70000", "a:x", ":1", "http://a:1", "::1:8001", "a b:1", "a\nb:1", "a,b:1", "[:1", "a:²", "\x1b:1"]
)
def test_a_bad_replica_is_named(url: str) -> None:
    with pytest.raises(InvalidArgument, match="replicas: must be .*, got"):
        Static([url])


def test_what_names_no_source_is_refused_with_those_there_are() -> None:
    for nothing in (None, 5, b"a:1", [8001]):
        with pytest.raises(InvalidArgument, match="replicas: must be 'HOST:PORT,HOST:PORT'.*, got ") as refused:
            discovery.source(nothing)
        assert str(refused.value).endswith(f", got {nothing!r}")


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="the list is empty"):
        Static([" "])


async def test_a_name_gives_every_address_with_its_port() -> None:
    async def resolve(name: str, port: int) -> list[str]:
        assert (name, port) == ("trident", 9001)
        return ["10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1"]

    assert await Dns("trident", 9001, resolve).replicas() == ("10.0.0.1:9001", "10.0.0.2:9001", "[fd00::1]:9001")


async def test_a_name_that_does_not_resolve_is_unavailable() -> None:
    async def resolve(_name: str, _port: int) -> list[str]:
        raise OSError(-2, "Name or service not known")

    async def nothing(_name: str, _port: int) -> list[str]:
        return []

    with pytest.raises(Unavailable, match="'trident' does not resolve: Name or service not known"):
        await Dns("trident", 1, resolve).replicas()
    with pytest.raises(Unavailable, match="has no address"):
        await Dns("trident", 1, nothing).replicas()


@pytest.mark.parametrize("name", ["a..b", "a" * 64])
async def test_a_name_that_cannot_be_asked_for_is_unavailable(name: str) -> None:
    with pytest.raises(Unavailable, match=f"'{name}' does not resolve: .*label"):
        await discovery.source(f"dns:///{name}:8001").replicas()


async def test_the_systems_resolver_is_the_default() -> None:
    assert "127.0.0.1:8001" in await Dns("localhost").replicas()


async def test_a_file_is_read_anew_each_time(tmp_path) -> None:
    path = tmp_path / "replicas"
    path.write_text("# ours\nb:2\n\na:1  # the old one\n")
    source = File(path)
    assert await source.replicas() == ("a:1", "b:2")
    path.write_text("c:3\n")
    assert await source.replicas() == ("c:3",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a:x\n", "is not a list of replicas: replicas: must be HOST:PORT with a port from 1 to 65535, got 'a:x'"),
        ("# none\n", "names no replica"),
    ],
)
async def test_a_file_that_makes_no_sense_is_unavailable(tmp_path, content: str, message: str) -> None:
    path = tmp_path / "replicas"
    with pytest.raises(Unavailable, match="cannot read the replicas in"):
        await File(path).replicas()
    path.write_text(content)
    with pytest.raises(Unavailable, match=message):
        await File(path).replicas()


async def test_a_source_is_told_by_its_form(tmp_path) -> None:
    path = tmp_path / "replicas"
    path.write_text("a:1\n")
    assert await discovery.source("a:1,b:2").replicas() == ("a:1", "b:2")
    assert await discovery.source(["a:1"]).replicas() == ("a:1",)
    assert await discovery.source(f"file://{path}").replicas() == ("a:1",)
    assert isinstance(discovery.source("dns:///trident:9001"), Dns)
    assert discovery.source(one := Static(["a:1"])) is one
    with pytest.raises(InvalidArgument, match="must be 'HOST:PORT,HOST:PORT', 'dns:///NAME:PORT' or 'file:///PATH'"):
        discovery.source("etcd://x")
