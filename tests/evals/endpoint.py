"""An OpenAI endpoint that answers as a function says, for what the real one cannot be made to do."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextlib.contextmanager
def endpoint(answer: Callable[[str, dict[str, Any]], tuple[int, Any]]) -> Iterator[str]:
    """Yields the URL, with /v1. answer: path and body of a request to status and JSON, or bytes."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            status, said = answer(self.path, json.loads(body or b"{}"))
            text = said if isinstance(said, bytes) else json.dumps(said).encode()
            self.send_response(status)
            self.send_header("content-type", "text/html" if text.startswith(b"<") else "application/json")
            self.send_header("content-length", str(len(text)))
            self.send_header("retry-after-ms", "1")
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST

        def log_message(self, *of: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def said(text: str, calls: list[tuple[str, str]] | None = None, finish_reason: str = "stop") -> dict[str, Any]:
    """A chat completion."""
    made = [
        {"id": str(n), "type": "function", "function": {"name": name, "arguments": given}}
        for n, (name, given) in enumerate(calls or ())
    ]
    message = {"role": "assistant", "content": text, "tool_calls": made or None}
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
