"""The management API's client, against an HTTP server."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from contract.errors import EngineFailed, Overloaded, Unavailable
from server import ports
from server.admin import AdminClient, fetch


class Handler(BaseHTTPRequestHandler):
    """Answers with ``server.responses[path]``: status and body; records (method, path, key, body)."""

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append((self.command, self.path, self.headers.get("trident-admin-key"), body))
        status, content = self.server.responses.get(self.path, (404, b"unknown"))
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture
def http():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.responses, server.requests = {}, []
        server.url = f"http://127.0.0.1:{server.server_port}"
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


async def test_readiness_is_the_status_of_the_ready_endpoint(http):
    admin = AdminClient(http.url, "key")
    assert not await admin.is_ready()
    http.responses["/v2/health/ready"] = (200, b"")
    assert await admin.is_ready()
    (free,) = ports.free(1)
    assert not await AdminClient(f"http://127.0.0.1:{free}", "key").is_ready()


async def test_states_are_listed_by_model(http):
    index = [{"name": "engine", "state": "READY"}, {"name": "other"}]
    http.responses["/v2/repository/index"] = (200, json.dumps(index).encode())
    assert await AdminClient(http.url, "key").states() == {"engine": "READY", "other": ""}
    assert http.requests[0][:3] == ("POST", "/v2/repository/index", "key")


async def test_load_and_unload_name_the_model_and_send_the_key(http):
    http.responses |= {f"/v2/repository/models/engine/{verb}": (200, b"") for verb in ("load", "unload")}
    admin = AdminClient(http.url, "key")
    await admin.unload("engine")
    await admin.load("engine", timeout_s=60)
    assert [request[1:3] for request in http.requests] == [
        ("/v2/repository/models/engine/unload", "key"),
        ("/v2/repository/models/engine/load", "key"),
    ]


async def test_readiness_is_failed_by_a_model_without_a_backend(http):
    http.responses["/v2/repository/models/draining/load"] = (400, b"no such backend")
    await AdminClient(http.url, "key").fail_readiness("draining")
    config = json.loads(json.loads(http.requests[0][3])["parameters"]["config"])
    assert (config["name"], config["backend"]) == ("draining", "none")


def test_a_status_other_than_200_is_an_error_with_the_body(http):
    http.responses["/full"] = (429, b"in ensemble: Overloaded: 1024 requests wait")
    with pytest.raises(EngineFailed, match="GET http.*/unknown: 404 unknown"):
        fetch(f"{http.url}/unknown")
    with pytest.raises(Overloaded, match="1024 requests wait"):
        fetch(f"{http.url}/full")


def test_no_response_is_unavailable():
    (free,) = ports.free(1)
    for url in (f"http://127.0.0.1:{free}/v2", "http:///v2"):
        with pytest.raises(Unavailable):
            fetch(url)
