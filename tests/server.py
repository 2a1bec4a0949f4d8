"""A server of files on this machine, for tests of downloads."""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar

Running = TypeVar("Running", bound="Server")


class Server:
    """Files over HTTP on this machine, with the misbehaviours of real servers."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.ranges = True
        self.break_after: int | None = None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self: Running) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        name, wanted = request.path.lstrip("/"), request.headers.get("Range")
        self.requests.append((name, wanted))
        content = self.files.get(name)
        if content is None:
            return request.send_error(404)
        start = int(re.findall(r"\d+", wanted)[0]) if wanted and self.ranges else 0
        if wanted and self.ranges:
            if start >= len(content):
                return request.send_error(416)
            request.send_response(206)
            request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            request.send_response(200)
        request.send_header("Content-Length", str(len(content) - start))
        request.end_headers()
        end = None if self.break_after is None else start + self.break_after
        request.wfile.write(content[start:end])
        return None
