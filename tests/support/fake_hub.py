"""A Hugging Face hub of one repository on this machine, as far as downloads ask for it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def commit(folder: Path) -> str:
    """Of the files as they are."""
    digest = hashlib.sha1()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


@contextmanager
def serving(
    repo_id: str,
    folder: Path,
    *,
    refusal: tuple[int, str] | None = None,
    cut: dict[str, int] | None = None,
    asked: list[str] | None = None,
    ranges: bool = True,
) -> Iterator[str]:
    """The address while the files of `folder` are that repository's.

    refusal: status and error code that files are refused with. cut: after how many bytes the first
    answer with that file breaks off. asked: gets a line for each file that is sent, whole or in
    part. ranges: whether parts are.
    """
    cuts = dict(cut or {})

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
                entries = [self._entry(name, data) for name, data in files.items()]
                siblings = [
                    {"rfilename": e["path"], "size": e["size"], "blobId": e["oid"]} for e in entries
                ]
                self._answer(
                    {"id": repo_id, "sha": commit(folder), "siblings": siblings, **self._said()}
                )
            elif path.startswith(f"/{repo_id}/resolve/") and refusal is not None:
                self._send(refusal[0], b"", {"X-Error-Code": refusal[1]} if refusal[1] else {})
            elif path.startswith(f"/{repo_id}/resolve/") and name in files:
                self._file(name, files[name])
            else:
                code = "EntryNotFound" if repo_id in path else "RepoNotFound"
                self._send(404, b"", {"X-Error-Code": code, "X-Repo-Commit": commit(folder)})

        def _said(self) -> dict[str, object]:
            return {"cardData": {"license": "mit"}, "config": {"tokenizer_config": {}}}

        def _file(self, name: str, data: bytes) -> None:
            etag = hashlib.sha1(data).hexdigest()
            headers = {
                "ETag": f'"{etag}"',
                "X-Repo-Commit": commit(folder),
                "Accept-Ranges": "bytes",
            }
            wanted = self.headers.get("Range", "") if ranges else ""
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end = int(first or 0), min(int(last or len(data)) + 1, len(data))
            if self.command == "GET" and asked is not None:
                asked.append(f"{name} from {begin}" + (f" to {end}" if last else ""))
            if wanted:
                headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
            most = cuts.pop(name, None) if self.command == "GET" else None
            self._send(206 if wanted else 200, data[begin:end], headers, most)

        def _entry(self, name: str, data: bytes) -> dict[str, object]:
            oid = hashlib.sha1(data).hexdigest()
            return {"type": "file", "path": name, "size": len(data), "oid": oid}

        def _answer(self, value: object) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _send(
            self, status: int, body: bytes, headers: dict[str, str], most: int | None = None
        ) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[:most])
            self.close_connection = most is not None

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
