"""A Hugging Face hub of one repository on this machine, as far as downloads ask for it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serving(repo_id: str, folder: Path) -> Iterator[str]:
    """The address while the files of `folder` are that repository's."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            files = {entry.name: entry.read_bytes() for entry in folder.iterdir()}
            name = path.removeprefix(f"/{repo_id}/resolve/").partition("/")[2]
            if path.startswith(f"/api/models/{repo_id}/tree/"):
                self._answer([self._entry(name, data) for name, data in files.items()])
            elif path.startswith(f"/api/models/{repo_id}"):
                siblings = [{"rfilename": name} for name in files]
                self._answer({"id": repo_id, "sha": COMMIT, "siblings": siblings})
            elif path.startswith(f"/{repo_id}/resolve/") and name in files:
                etag = hashlib.sha1(files[name]).hexdigest()
                self._send(200, files[name], {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
            else:
                code = "EntryNotFound" if repo_id in path else "RepoNotFound"
                self._send(404, b"", {"X-Error-Code": code, "X-Repo-Commit": COMMIT})

        def _entry(self, name: str, data: bytes) -> dict[str, object]:
            oid = hashlib.sha1(data).hexdigest()
            return {"type": "file", "path": name, "size": len(data), "oid": oid}

        def _answer(self, value: object) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing: standard error is the tests'."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
