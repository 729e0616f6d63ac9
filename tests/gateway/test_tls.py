"""TLS on every hop, with the certificates that docs/tls.md makes and the clients that people use."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import ssl
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

openai = pytest.importorskip("openai")
for needed in ("starlette", "uvicorn", "orjson", "pydantic", "prometheus_client", "opentelemetry.sdk", "httptools"):
    pytest.importorskip(needed)

import aiohttp
import grpc
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from contract.errors import InvalidArgument
from gateway.config.settings import Settings, variable
from server.registration import Registration
from server.settings import Settings as ServerSettings
from tests.fakes.replica import FakeReplica
from tests.gateway.running import Running, gateway, until

DOCS = Path(__file__).parents[2] / "docs" / "tls.md"


def issued(folder: Path) -> Path:
    """Runs the commands of the documentation in a folder."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not on PATH")
    [commands] = re.findall(r"```sh\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)
    folder.mkdir()
    done = subprocess.run(["sh", "-euc", commands], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return issued(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same files, of another authority."""
    return issued(tmp_path_factory.mktemp("tls") / "theirs")


def served(pki: Path) -> dict[str, Path]:
    return {"tls_cert": pki / "gateway.pem", "tls_key": pki / "gateway.key"}


def client(running: Running, trusted: Path, own: Path | None = None) -> openai.AsyncOpenAI:
    context = ssl.create_default_context(cafile=trusted / "ca.pem")
    if own is not None:
        context.load_cert_chain(own / "client.pem", own / "client.key")
    http = openai.DefaultAsyncHttpxClient(verify=context)
    return openai.AsyncOpenAI(
        base_url=f"https://localhost:{running.port}/v1", api_key="any", max_retries=0, http_client=http
    )


async def ready(running: Running, trusted: Path, own: Path | None = None) -> bool:
    """Asked by tritonclient. Raises InferenceServerException where there is no connection."""
    files = {"private_key": str(own / "client.key"), "certificate_chain": str(own / "client.pem")} if own else {}
    url = f"localhost:{running.grpc_url.rpartition(':')[2]}"
    async with triton.InferenceServerClient(url, ssl=True, root_certificates=str(trusted / "ca.pem"), **files) as ask:
        return await ask.is_server_ready(client_timeout=60.0)


async def test_both_protocols_are_verified_by_the_clients_people_use(pki: Path, stranger: Path):
    async with FakeReplica() as replica, gateway(replica, **served(pki)) as running:
        async with client(running, pki) as ask:
            done = await ask.completions.create(model="demo", prompt="one two", max_tokens=3)
            assert done.choices[0].text == " one two one"
            stream = await ask.completions.create(model="demo", prompt="one", max_tokens=2, stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == " one one"
        assert await ready(running, pki)
        async with client(running, stranger) as ask:
            with pytest.raises(openai.APIConnectionError):
                await ask.models.list()
        with pytest.raises(InferenceServerException):
            await ready(running, stranger)


async def test_plain_text_is_not_answered_where_tls_is_served(pki: Path):
    async with FakeReplica() as replica, gateway(replica, **served(pki)) as running:
        with pytest.raises(aiohttp.ClientError):
            await running.get("/v1/models")
        channel = grpc.aio.insecure_channel(running.grpc_url)
        async with channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary("/inference.GRPCInferenceService/ServerReady")(b"", timeout=60.0)


async def test_old_versions_of_tls_are_refused(pki: Path):
    async with gateway(**served(pki)) as running:
        for version, accepted in ((ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True)):
            context = ssl.create_default_context(cafile=pki / "ca.pem")
            context.set_ciphers("DEFAULT@SECLEVEL=0")  # or this side would refuse already
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                context.minimum_version = context.maximum_version = version
            try:
                _, writer = await asyncio.open_connection("localhost", running.port, ssl=context)
                writer.close()
                assert accepted
            except (ssl.SSLError, ConnectionError):
                assert not accepted


async def test_a_client_needs_a_certificate_of_the_authority_at_both_protocols(pki: Path, stranger: Path):
    async with FakeReplica() as replica:
        async with gateway(replica, **served(pki), tls_client_ca=pki / "ca.pem") as running:
            async with client(running, pki, own=pki) as ask:
                done = await ask.completions.create(model="demo", prompt="one", max_tokens=1)
                assert done.choices[0].text == " one"
            assert await ready(running, pki, own=pki)
            for own in (None, stranger):
                async with client(running, pki, own=own) as ask:
                    with pytest.raises(openai.APIConnectionError):
                        await ask.models.list()
                with pytest.raises(InferenceServerException):
                    await ready(running, pki, own=own)
            assert replica.counts.started == 1


@pytest.mark.slow  # several gateways, of which most find no replica
@pytest.mark.parametrize("asks_back", [False, True])
async def test_replicas_are_reached_over_tls_and_learn_who_the_gateway_is(pki: Path, stranger: Path, asks_back: bool):
    pair = [((pki / "replica.key").read_bytes(), (pki / "replica.pem").read_bytes())]
    root = (pki / "ca.pem").read_bytes() if asks_back else None
    replica = await FakeReplica().start(tls=grpc.ssl_server_credentials(pair, root, require_client_auth=asks_back))
    trust = {"replica_ca": pki / "ca.pem", "replica_name": "replica.internal"}
    known = {"replica_cert": pki / "client.pem", "replica_key": pki / "client.key"}
    unknown = {"replica_cert": stranger / "client.pem", "replica_key": stranger / "client.key"}
    async with replica:
        async with gateway(replica, **trust, **(known if asks_back else {})) as running:
            await until(running.service.ready)
            body = {"model": "demo", "prompt": "one", "max_tokens": 2}
            status, _, fields = await running.post("/v1/completions", body)
            assert (status, fields["choices"][0]["text"]) == (200, " one one")
        wrong = [{}, {"replica_ca": stranger / "ca.pem", "replica_name": "replica.internal"}]
        wrong += [{"replica_ca": pki / "ca.pem"}]  # and so the name in its certificate is not its address
        wrong += [trust, trust | unknown] if asks_back else []
        before = replica.counts.started
        for settings in wrong:
            async with gateway(replica, **settings) as running:
                assert not running.service.ready()
                assert (await running.post("/v1/completions", body))[0] == 503
        assert replica.counts.started == before


def test_halves_of_a_configuration_are_refused_by_name(pki: Path):
    for settings, name in [
        ({"tls_cert": pki / "gateway.pem"}, "TLS_KEY"),
        ({"tls_client_ca": pki / "ca.pem"}, "TLS_CLIENT_CA"),
        ({"replica_ca": pki / "ca.pem", "replica_key": pki / "client.key"}, "REPLICA_KEY"),
        ({"replica_cert": pki / "client.pem", "replica_key": pki / "client.key"}, "REPLICA_CA"),
        ({"replica_name": "replica.internal"}, "REPLICA_CA"),
        ({"replica_ca": pki / "none.pem"}, "REPLICA_CA"),
    ]:
        with pytest.raises(InvalidArgument, match=f"TRIDENT_GATEWAY_{name}"):
            Settings(**settings)


def test_what_the_documentation_sets_can_be_set():
    named = set(re.findall(r"TRIDENT_GATEWAY_[A-Z_]+", DOCS.read_text("utf-8")))
    assert {f"TRIDENT_GATEWAY_{name}" for name in ("TLS_CERT", "TLS_CLIENT_CA", "REPLICA_CA")} <= named
    assert named <= {variable(name) for name in Settings.model_fields}


async def test_a_replica_registers_over_tls(pki: Path, stranger: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("an-operators-token-0123")
    async with gateway(**served(pki), admin_token_file=token, replicas="registered") as running:
        entries = running.service.replicas.registrations.entries
        for authority, accepted in ((stranger, False), (pki, True)):
            said: list[str] = []
            settings = ServerSettings(
                register_=f"localhost:{running.port}", register_token_file=token, register_ca=authority / "ca.pem"
            )
            registration = Registration(settings, {}, lambda: ("ready", None), said.append)
            await until(lambda: bool(entries() or said))  # noqa: B023
            assert bool(entries()) is accepted and (accepted or "certificate" in said[0])
            await registration.close()


@pytest.mark.slow  # starts whole programs
async def test_commands_trust_the_authority_of_the_environment(pki: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("an-operators-token-0123")
    async with gateway(**served(pki), admin_token_file=token, replicas="registered") as running:
        url = f"https://localhost:{running.port}"
        for authority, code in (({}, 2), ({"SSL_CERT_FILE": str(pki / "ca.pem")}, 0)):
            environ = {**os.environ, variable("admin_token_file"): str(token), **authority}
            words = ("-m", "gateway", "release", "status", "--gateway", url)
            command = await asyncio.create_subprocess_exec(sys.executable, *words, env=environ)
            assert await command.wait() == code


async def test_what_has_no_certificate_cannot_register_where_clients_need_one(pki: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("an-operators-token-0123")
    files = {**served(pki), "tls_client_ca": pki / "ca.pem", "admin_token_file": token}
    async with gateway(**files, replicas="registered") as running:
        said: list[str] = []
        settings = ServerSettings(
            register_=f"localhost:{running.port}", register_token_file=token, register_ca=pki / "ca.pem"
        )
        registration = Registration(settings, {}, lambda: ("ready", None), said.append)
        await until(lambda: bool(said))
        assert not running.service.replicas.registrations.entries()
        await registration.close()
