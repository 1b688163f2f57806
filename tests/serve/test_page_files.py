"""The chat page's files: their headers, and that nothing in them leads elsewhere."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("starlette", reason="starlette is not installed (the extra serve)")
pytest.importorskip("httpx", reason="httpx is not installed")

from starlette.applications import Starlette
from starlette.testclient import TestClient

from helm.serve.page import page_routes


def test_headers_and_tags() -> None:  # of the installed package, which has the files
    client = TestClient(Starlette(routes=page_routes()))
    for path, kind in (
        ("/", "text/html"),
        ("/app.js", "text/javascript"),
        ("/app.css", "text/css"),
    ):
        got = client.get(path)
        assert got.status_code == 200
        assert got.headers["content-type"] == f"{kind}; charset=utf-8"
        assert got.headers["x-content-type-options"] == "nosniff"
        policy = got.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        tag = got.headers["etag"]
        for known in (tag, f'"x", W/{tag}'):
            again = client.get(path, headers={"if-none-match": known})
            assert (again.status_code, again.content) == (304, b"")
        assert client.get(path, headers={"if-none-match": '"x"'}).status_code == 200
        assert client.head(path).headers["etag"] == tag


def test_the_page_asks_for_nothing_elsewhere() -> None:
    client = TestClient(Starlette(routes=page_routes()))
    page, script, style = (client.get(path).text for path in ("/", "/app.js", "/app.css"))
    assert "innerHTML" not in script
    assert not re.search(r"\son\w+=|style=|<script>|<style", page)
    assert not re.search(r"@import|url\(", style)
    outside = re.findall(r"(?:href|src)=\"(?!/|#|data:)[^\"]*\"", page)
    assert outside == []
