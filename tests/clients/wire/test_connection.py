from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from clients import NO_RETRY, TLS, AsyncClient
from clients.wire.connection import Connection, connection, trace_context
from contract.errors import InvalidArgument, Unavailable
from tests.fakes.replica import FakeReplica

# Made for these tests alone, valid for a hundred years; the server's name is server.test.
CERTIFICATES = Path(__file__).parents[1] / "certificates"
CA, SERVER, CLIENT = CERTIFICATES / "ca.pem", CERTIFICATES / "server", CERTIFICATES / "client"


def server_credentials(mutual: bool) -> grpc.ServerCredentials:
    pair = (SERVER.with_suffix(".key").read_bytes(), SERVER.with_suffix(".pem").read_bytes())
    return grpc.ssl_server_credentials([pair], CA.read_bytes() if mutual else None, mutual)


async def test_a_stream_over_tls_needs_the_right_authority_and_name() -> None:
    replica = await FakeReplica().start(tls=server_credentials(mutual=False))
    async with replica:
        async with AsyncClient(replica.url, tls=TLS(CA, server_name="server.test")) as client:
            assert (await client.complete("x", max_tokens=2)).text == " x x"
        async with AsyncClient(replica.url, tls=TLS(CA), retry=NO_RETRY) as client:
            with pytest.raises(Unavailable):
                await client.complete("x", timeout_s=60)
        async with AsyncClient(replica.url, retry=NO_RETRY) as client:
            with pytest.raises(Unavailable):
                await client.complete("x", timeout_s=60)


async def test_mutual_tls_needs_our_certificate() -> None:
    replica = await FakeReplica().start(tls=server_credentials(mutual=True))
    ours = TLS(CA, CLIENT.with_suffix(".pem"), CLIENT.with_suffix(".key"), "server.test")
    async with replica:
        async with AsyncClient(replica.url, tls=ours) as client:
            assert (await client.complete("x", max_tokens=2)).text == " x x"
        async with AsyncClient(replica.url, tls=TLS(CA, server_name="server.test"), retry=NO_RETRY) as client:
            with pytest.raises(Unavailable):
                await client.complete("x", timeout_s=60)


def test_the_url_comes_from_the_argument_then_the_environment_then_the_default(monkeypatch) -> None:
    monkeypatch.setenv("TRIDENT_URL", "elsewhere:9001")
    assert connection("here:1", None, "", ()).url == "here:1"
    assert connection(None, None, "", ()).url == "elsewhere:9001"
    monkeypatch.delenv("TRIDENT_URL")
    assert connection(None, None, "", ()).url == "127.0.0.1:8001"
    with pytest.raises(InvalidArgument, match="url: must be .*, got ''"):
        connection("", None, "", ())
    whole = Connection("here:1")
    assert connection(whole, None, "", ()) is whole


def test_tls_of_another_kind_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"tls: must be True or TLS\(...\), got 'ca.pem'"):
        connection("here:1", "ca.pem", "", ())


@pytest.mark.parametrize(
    "url", [8001, "http://127.0.0.1:8000", "8001", "grpc://x:1", "", "127.0.0.1:0", "127.0.0.1:65537"]
)
def test_a_url_of_another_kind_is_refused_with_an_example(url: object) -> None:
    with pytest.raises(InvalidArgument, match="url: must be HOST:PORT of the server's gRPC endpoint.*, got .*"):
        Connection(url)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metadata": (("X-Tenant", "a"),)}, "metadata: got the key 'X-Tenant'"),
        ({"metadata": (("x-tenant-bin", "a"),)}, "metadata: got the key 'x-tenant-bin'"),
        ({"metadata": (("grpc-timeout", "1S"),)}, "metadata: got the key 'grpc-timeout'"),
        ({"metadata": (("x-tenant", "ä"),)}, "metadata: the value of 'x-tenant' has characters"),
        ({"metadata": ((5, "a"),)}, "metadata: got the key 5"),
        ({"metadata": (("x-tenant", 5),)}, "metadata: the value of 'x-tenant' has characters"),
        ({"api_key": "secret\n"}, "api_key: it has characters that are not printable ASCII"),
        ({"api_key": None}, "api_key: must be text, got NoneType"),
    ],
)
def test_what_grpc_would_refuse_to_send_is_named_before(arguments: dict, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Connection(**arguments)


def test_a_trace_context_is_w3cs_or_fresh() -> None:
    given = f"00-{'a' * 32}-{'b' * 16}-01"
    assert trace_context(given) == given
    assert trace_context("") != trace_context("")
    zeros = (f"00-{'0' * 32}-{'b' * 16}-01", f"00-{'a' * 32}-{'0' * 16}-01", f"ff-{'a' * 32}-{'b' * 16}-01")
    for bad in ("mine", 5, *zeros):
        with pytest.raises(InvalidArgument, match=f"traceparent: must be W3C's form .*, got {bad!r}"):
            trace_context(bad)


def test_a_certificate_without_its_key_and_a_missing_file_are_named(tmp_path) -> None:
    with pytest.raises(InvalidArgument, match="tls: cert and key go together"):
        TLS(cert=CA).credentials()
    with pytest.raises(InvalidArgument, match="tls.root: must be a certificate in PEM, got .*nope.pem"):
        TLS(root=tmp_path / "nope.pem").credentials()
    with pytest.raises(InvalidArgument, match="tls.cert: must be a certificate with its key.*ca.pem and .*ca.pem"):
        TLS(cert=CA, key=CA).credentials()


def test_keepalive_is_set_and_grpcs_own_retries_are_off() -> None:
    options = dict(Connection(tls=TLS(server_name="n")).options())
    assert (options["grpc.keepalive_time_ms"], options["grpc.keepalive_timeout_ms"]) == (30_000, 10_000)
    assert options["grpc.http2.ping_timeout_ms"] == 10_000
    assert options["grpc.enable_retries"] == 0
    assert options["grpc.ssl_target_name_override"] == "n"
