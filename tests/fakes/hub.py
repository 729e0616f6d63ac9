"""A model hub in little: one repository at one commit over HTTP, answering as huggingface_hub expects."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def git_sha1(content: bytes) -> str:
    """What the hub calls a small file's ETag: git's name of its content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextlib.contextmanager
def serving(repository: str, files: dict[str, bytes], *, gated: bool = False) -> Iterator[tuple[str, list[str]]]:
    """(endpoint for HF_ENDPOINT, list of downloaded file names that grows)."""
    downloaded: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            path = self.path.split("?")[0]
            revision, resolve = f"/api/models/{repository}/revision/", f"/{repository}/resolve/"
            if gated and "secret" not in self.headers.get("Authorization", ""):
                return self._send(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"}, body)
            if path.startswith(revision) and path.removeprefix(revision) in ("main", COMMIT):
                siblings = [{"rfilename": name} for name in files]
                answer = {"id": repository, "modelId": repository, "sha": COMMIT, "siblings": siblings, "tags": []}
                return self._send(
                    200, json.dumps(answer | {"private": False, "downloads": 0, "likes": 0}).encode(), {}, body
                )
            if path.startswith(revision):
                return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
            if path.startswith(f"/api/models/{repository}/tree/"):
                entries = [
                    {"type": "file", "path": name, "size": len(content), "oid": git_sha1(content)}
                    for name, content in files.items()
                ]
                return self._send(200, json.dumps(entries).encode(), {}, body)
            name = path.removeprefix(resolve).partition("/")[2]
            if path.startswith(resolve) and name in files:
                if body:
                    downloaded.append(name)
                etag = f'"{git_sha1(files[name])}"'
                return self._send(200, files[name], {"X-Repo-Commit": COMMIT, "ETag": etag}, body)
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)

        def _send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
            self.send_response(status)
            for key, value in ({"Content-Length": str(len(content))} | headers).items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", downloaded
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
