"""Fetching a URL that a client named, from hosts that the operator named (MEDIA-03).

The list of hosts decides, before any connection and again for each redirect. A host that is listed by its full
name may be anywhere, also inside the operator's network; one that only matches a pattern must be a public
address, and the address that was checked is the one that is connected to.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import ipaddress
import socket
import ssl
import time
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from openengine_adapters.core.errors import invalid

MAX_REDIRECTS = 3
FETCHES_AT_ONCE = 8
CHUNK_BYTES = 64 * 1024

_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_PATH_SAFE = "%/:=&?~+!$,;'@()*[]"

Take = Callable[[str, int], None]
"""Counts bytes for a field; raises `Rejected` when they become too many."""


@dataclass(frozen=True, slots=True)
class HostRule:
    """One `--allow-media-host`: ``host``, ``host:port``, ``*.domain`` or ``*`` (any public host)."""

    host: str
    port: int | None = None  # None: the scheme's own

    @classmethod
    def parse(cls, text: str) -> HostRule:
        """Raises ValueError."""
        parts = urllib.parse.urlsplit(f"//{text}")
        host = _ascii_host(parts.hostname or "")
        stem = "any" if parts.hostname == "*" else host.removeprefix("*.")
        extra = parts.path or parts.query or parts.fragment or parts.username
        if extra or not stem or "*" in stem:
            raise ValueError(f"{text!r} is no host; give host, host:port, *.domain or *")
        return cls(host, parts.port)

    @property
    def exact(self) -> bool:
        """Whether the rule names one host in full."""
        return "*" not in self.host

    def matches(self, host: str, port: int, scheme: str) -> bool:
        """Whether the rule allows this place."""
        if port != (_PORTS[scheme] if self.port is None else self.port):
            return False
        return self.host == "*" or host == self.host or (not self.exact and host.endswith(self.host[1:]))


@dataclass(frozen=True, slots=True)
class _Target:
    scheme: str
    host: str
    port: int
    path: str
    anywhere: bool  # private addresses are allowed, too


@dataclass(frozen=True, slots=True)
class _Answer:
    data: bytes = b""
    mime_type: str = ""
    location: str = ""


class Fetcher:
    """Fetches from allowed hosts, `FETCHES_AT_ONCE` at a time, each within `timeout_s` seconds."""

    def __init__(self, rules: Sequence[HostRule], timeout_s: float) -> None:
        self._rules = rules
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(FETCHES_AT_ONCE)

    async def fetch(self, field: str, url: str, take: Take) -> tuple[bytes, str]:
        """Return the file's bytes and MIME type. Raises `Rejected` INVALID_ARGUMENT."""
        target = self._allowed(field, url)
        async with self._slots:
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = await self._get(field, target, take)
                    for _ in range(MAX_REDIRECTS):
                        if not answer.location:
                            break
                        url = urllib.parse.urljoin(url, answer.location)
                        answer = await self._get(field, self._allowed(field, url), take)
            except TimeoutError:
                raise invalid(
                    field, f"was not fetched within {self._timeout_s:g} s", limit=self._timeout_s
                ) from None
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise invalid(field, f"could not be fetched ({type(error).__name__})") from error
        if answer.location:
            raise invalid(field, f"redirects more than {MAX_REDIRECTS} times", limit=MAX_REDIRECTS)
        return answer.data, answer.mime_type

    def _allowed(self, field: str, url: str) -> _Target:
        if not self._rules:
            raise invalid(field, "this server fetches no URLs; send data_uri or raw_bytes")
        try:
            parts = urllib.parse.urlsplit(url)
            host = _ascii_host(parts.hostname or "")
            port = parts.port or _PORTS.get(parts.scheme, 0)
        except ValueError:
            raise invalid(field, "is not a valid URL") from None
        if parts.scheme not in _PORTS or not host:
            raise invalid(field, "must be an http or https URL")
        if parts.username is not None or parts.password is not None:
            raise invalid(field, "must not hold a user name or password")
        rules = [rule for rule in self._rules if rule.matches(host, port, parts.scheme)]
        if not rules:
            raise invalid(
                field, f"{host}:{port} is not among the hosts that this server fetches from", value=host
            )
        path = urllib.parse.quote(parts.path or "/", safe=_PATH_SAFE)
        if parts.query:
            path += "?" + urllib.parse.quote(parts.query, safe=_PATH_SAFE)
        return _Target(parts.scheme, host, port, path, any(rule.exact for rule in rules))

    async def _get(self, field: str, target: _Target, take: Take) -> _Answer:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        addresses = [str(sockaddr[0]) for *_, sockaddr in found]
        if not target.anywhere and not all(map(is_public, addresses)):
            raise invalid(
                field, "its host is no public address; only a host that is listed by its full name may be"
            )
        connection = _Connection(target, addresses, self._timeout_s)
        try:
            return await asyncio.to_thread(_read, connection, field, target.path, take)
        finally:
            # A thread that still waits for the network wakes up and ends.
            connection.shut()


def _read(connection: _Connection, field: str, path: str, take: Take) -> _Answer:
    """One request and its response, in a thread of its own."""
    with contextlib.closing(connection):
        connection.request(
            "GET", path, headers={"Accept-Encoding": "identity", "User-Agent": "openengine-adapters"}
        )
        response = connection.getresponse()
        location = response.getheader("Location", "")
        if 300 <= response.status < 400 and location:
            return _Answer(location=location)
        if response.status != 200:
            raise invalid(field, f"its host answered with status {response.status}", value=response.status)
        if response.getheader("Content-Encoding", "identity").lower() != "identity":
            raise invalid(field, "its host sent a compressed answer, which was not asked for")
        chunks = []
        due = response.length
        while chunk := response.read1(CHUNK_BYTES):
            take(field, len(chunk))
            chunks.append(chunk)
        data = b"".join(chunks)
        if due is not None and len(data) != due:
            raise invalid(field, f"its host sent {len(data)} of {due} bytes")
        return _Answer(data, response.headers.get_content_type())


class _Connection(http.client.HTTPConnection):
    """A connection to a host by its name over addresses that were looked up and checked before."""

    def __init__(self, target: _Target, addresses: Sequence[str], timeout_s: float) -> None:
        super().__init__(target.host, target.port, timeout=timeout_s)
        self.default_port = _PORTS[target.scheme]
        self._tls = target.scheme == "https"
        self._addresses = addresses
        self._end = time.monotonic() + timeout_s
        self._shut = False

    def connect(self) -> None:
        """Connect to the first address that answers."""
        plain = self._connect()
        self.sock = plain
        if self._shut:
            raise TimeoutError
        if self._tls:
            self.sock = ssl.create_default_context().wrap_socket(plain, server_hostname=self.host)

    def _connect(self) -> socket.socket:
        for address in self._addresses:
            left = self._end - time.monotonic()
            if left <= 0 or self._shut:
                raise TimeoutError
            try:
                return socket.create_connection((address, self.port), left)
            except OSError as error:
                failure = error
        raise failure

    def shut(self) -> None:
        """Let a read or write that waits in another thread fail at once."""
        self._shut = True
        sock = self.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def is_public(address: str) -> bool:
    """Whether an address is out in the Internet, also when it wraps an IPv4 address in an IPv6 one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        wrapped = ip.ipv4_mapped or ip.sixtofour
        if ip in _NAT64:
            wrapped = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if ip.teredo is not None:
            wrapped = ip.teredo[1]
        if wrapped is not None:
            return is_public(str(wrapped))
    return ip.is_global and not (ip.is_multicast or ip.is_reserved)


def _ascii_host(host: str) -> str:
    """A host in the form that DNS knows, in small letters. Raises ValueError."""
    return (
        host.rstrip(".").encode("idna").decode("ascii").lower()
        if not host.isascii()
        else host.rstrip(".").lower()
    )
