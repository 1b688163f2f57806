"""Who may ask: keys, hosts and origins. Keys are compared in constant time and never shown."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from helm.base.files import read_text
from helm.errors import InvalidError
from helm.serve.errors import ApiError

_LOCAL = ("localhost", "127.0.0.1", "::1")
_OPEN = frozenset({"/", "/health", "/app.js", "/app.css", "/favicon.ico"})  # need no key


@dataclass(frozen=True)
class Access:
    """Checks of every request. keys: SHA-256 of each; empty: anyone may ask. origins: pages of
    other hosts that may ask, "*" for all. local: whether only this machine can reach the server.
    """

    keys: tuple[bytes, ...] = field(default=(), repr=False)
    origins: tuple[str, ...] = ()
    local: bool = True

    def check_host(self, host: str | None) -> None:
        """Refuses names that a page of the web may have bound to this machine."""
        if not self.local or host is None:
            return
        if not _is_local(_name(host)):
            raise ApiError(
                403,
                "this server answers only to localhost, 127.0.0.1 and [::1]; the request names "
                "another host",
                code="host_not_allowed",
            )

    def check_origin(self, origin: str | None, host: str | None) -> bool:
        """Whether the answer is to allow a page of another host; refuses those not allowed."""
        if origin is None:
            return False
        if "*" in self.origins or origin in self.origins:
            return True
        if host is not None and origin.partition("://")[2] == host:
            return False  # the server's own page
        raise ApiError(
            403,
            "pages of another origin may not use this server; it was not started with "
            "--cors-origin for them",
            code="origin_not_allowed",
        )

    def client(self, path: str, authorization: str | None, address: str) -> int:
        """A number for who asks: of the key, or of the address where none is needed. 401."""
        if not self.keys or path in _OPEN:
            return zlib.crc32(address.encode())
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip())
        found = 0
        for place, known in enumerate(self.keys, 1):
            found += place * hmac.compare_digest(digest, known)  # never leaves early
        if not found or scheme.lower() != "bearer":
            missing = "no key" if authorization is None else "a key that is not known"
            raise ApiError(
                401,
                f"the request has {missing}; send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return found


def read_keys(path: str | None) -> tuple[bytes, ...]:
    """Digests of the keys of a file, one a line, and of HELM_API_KEY; `#` begins a comment."""
    lines = [os.environ.get("HELM_API_KEY", "")]
    if path is not None:
        lines += read_text(Path(path).expanduser(), InvalidError, "serve").splitlines()
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if path is not None and not keys:
        raise InvalidError(f"[serve] {path} has no key; write one a line")
    if any(not key.isascii() or any(c.isspace() for c in key) for key in keys):
        raise InvalidError("[serve] a key must be one word of ASCII characters; write one a line")
    return tuple(dict.fromkeys(map(_digest, keys)))


def access(
    host: str, keys: Sequence[bytes], origins: Sequence[str], no_auth: bool = False
) -> Access:
    """The checks of a server that listens at `host`; refuses one that all may use from afar, unless
    `no_auth` insists."""
    local = _is_local(host)
    if no_auth and keys:
        raise InvalidError(
            "[serve] --no-auth lets anyone ask, and there are keys; leave out --no-auth, or "
            "--api-key-file and HELM_API_KEY"
        )
    if not local and not keys and not no_auth:
        raise InvalidError(
            f"[serve] {host} can be reached from other machines, and there is no key; give "
            "--api-key-file FILE or HELM_API_KEY, listen at 127.0.0.1, or insist with --no-auth"
        )
    for origin in origins:
        if origin != "*" and "://" not in origin:
            raise InvalidError(
                f"[serve] {origin} is no origin; give it as https://example.org, or *"
            )
    return Access(tuple(keys), tuple(o.rstrip("/") for o in origins), local)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _name(host: str) -> str:
    """Without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _is_local(name: str) -> bool:
    name = name.lower().rstrip(".")
    if name in _LOCAL or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
