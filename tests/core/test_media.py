"""Media items become bytes, within bounds, and a URL is fetched only from where the operator allows (MEDIA-03)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.server
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openengine.v1 import inputs_pb2, lifecycle_pb2
from openengine_adapters import options
from openengine_adapters.core import fetch
from openengine_adapters.core.errors import Rejected
from openengine_adapters.core.fetch import HostRule, is_public
from openengine_adapters.core.media import MediaLoader, MediaPolicy
from openengine_adapters.engine import GenerationSupport, Media
from tests.core.conftest import SOON_S, serve, until
from tests.core.fake_engine import FakeEngine, length_finish

IMAGE = inputs_pb2.MODALITY_IMAGE


class Site(http.server.ThreadingHTTPServer):
    """A web site with one page for each way in which a fetch can go; it counts the connections."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Page)
        self.paths: list[str] = []
        self.connections = 0
        self.leave = threading.Event()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def url(self, path: str) -> str:
        return f"http://{self.host}{path}"

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections += 1
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is no news."""


class Page(http.server.BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        match self.path.split("/")[1:]:
            case ["file", *_]:
                self._answer(b"file", {"Content-Type": "image/png; charset=x"})
            case ["big", size]:
                self._answer(b"x" * int(size), {})
            case ["endless"]:
                self._endless(b"x" * 65536)
            case ["drip"]:
                self._endless(b"x", wait=0.05)
            case ["silent"]:
                self.server.leave.wait(SOON_S)
            case ["short"]:
                self._answer(b"abc", {"Content-Length": "9"})
            case ["gzip"]:
                self._answer(b"abc", {"Content-Encoding": "gzip"})
            case ["empty"]:
                self._answer(b"", {})
            case ["loop"]:
                self._answer(b"", {"Location": "/loop"}, 302)
            case ["hop", left] if left != "0":
                self._answer(b"", {"Location": f"/hop/{int(left) - 1}"}, 307)
            case ["hop", "0"]:
                self._answer(b"there", {})
            case ["to", *where]:
                self._answer(b"", {"Location": "/".join(where)}, 302)
            case _:
                self._answer(b"", {}, 404)

    def _answer(self, body: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _endless(self, chunk: bytes, wait: float = 0.0) -> None:
        self.send_response(200)
        self.end_headers()
        while not self.server.leave.wait(wait):
            self.wfile.write(chunk)
            self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet."""


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.leave.set()
            server.shutdown()
            thread.join(SOON_S)


async def load(*items: inputs_pb2.MediaItem, **policy: Any) -> list[Media]:
    async with asyncio.timeout(SOON_S):
        return await MediaLoader(MediaPolicy(**policy)).for_request().load("media", items)


async def refused(*items: inputs_pb2.MediaItem, **policy: Any) -> str:
    with pytest.raises(Rejected) as caught:
        await load(*items, **policy)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    return str(caught.value)


def by_url(url: str) -> inputs_pb2.MediaItem:
    return inputs_pb2.MediaItem(url=url)


def rules(*hosts: str) -> tuple[HostRule, ...]:
    return tuple(map(HostRule.parse, hosts))


# ------------------------------------------------------------------------------------------- bytes and data URIs


async def test_bytes_and_data_uris_in_order() -> None:
    """MEDIA-01."""
    uri = "data:image/webp;base64," + base64.b64encode(b"second").decode()
    first, second, third = await load(
        inputs_pb2.MediaItem(raw_bytes=b"first", uuid="id", mime_type="image/png"),
        inputs_pb2.MediaItem(data_uri=uri, modality=inputs_pb2.MODALITY_AUDIO),
        inputs_pb2.MediaItem(data_uri=uri, mime_type="image/jpeg"),
    )
    assert first == Media(IMAGE, b"first", "media[0].raw_bytes", "image/png", "id")
    assert second == Media(inputs_pb2.MODALITY_AUDIO, b"second", "media[1].data_uri", "image/webp")
    assert third.mime_type == "image/jpeg"


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "data:",
        "image/png;base64,AAAA",
        "data:image/png,AAAA",
        "data:image/png;base64",
        "data:image/png;base64,A",
        "data:image/png;base64,AA A",
        "data:image/png;base64,_-_-",
        "data:image/png;base64,ÄÄÄÄ",
        "http://example.org/;base64,AAAA",
    ],
)
async def test_broken_data_uris(uri: str) -> None:
    assert (await refused(inputs_pb2.MediaItem(data_uri=uri))).startswith("media[0].data_uri: ")


@pytest.mark.parametrize(
    "item", [inputs_pb2.MediaItem(raw_bytes=b""), inputs_pb2.MediaItem(data_uri="data:image/png;base64,")]
)
async def test_media_without_bytes(item: inputs_pb2.MediaItem) -> None:
    assert "holds no bytes" in await refused(item)


async def test_one_size_limit_for_a_request() -> None:
    """The limit itself passes, one byte more does not, however it is spread."""
    raw = inputs_pb2.MediaItem(raw_bytes=b"x" * 7)
    uri = inputs_pb2.MediaItem(data_uri="data:image/png;base64," + base64.b64encode(b"y" * 5).decode())
    assert len(await load(raw, uri, max_bytes=12)) == 2
    assert "more than the 11 bytes" in await refused(raw, uri, max_bytes=11)


@given(st.binary(min_size=1, max_size=40))
async def test_any_bytes_survive_a_data_uri(data: bytes) -> None:
    uri = "data:application/octet-stream;base64," + base64.b64encode(data).decode()
    (media,) = await load(inputs_pb2.MediaItem(data_uri=uri), max_bytes=len(data))
    assert media.data == data


# ---------------------------------------------------------------------------------------------------------- URLs


async def test_an_allowed_url_is_fetched(site: Site) -> None:
    (media,) = await load(by_url(site.url("/file/ä b?q=1 2#part")), hosts=rules(site.host))
    assert (media.data, media.mime_type) == (b"file", "image/png")
    assert site.paths == ["/file/%C3%A4%20b?q=1%202"]


@pytest.mark.parametrize(
    "allowed", [(), ("example.org",), ("localhost",), ("127.0.0.1",), ("*.0.0.1",), ("*",)]
)
async def test_a_refused_url_opens_no_connection(site: Site, allowed: tuple[str, ...]) -> None:
    """Neither is the host listed in full with its port, nor is it public."""
    assert (await refused(by_url(site.url("/file")), hosts=rules(*allowed))).startswith("media[0].url: ")
    assert site.connections == 0


async def test_a_pattern_never_reaches_a_private_address(site: Site) -> None:
    """Also under another name, in another notation, and after a redirect."""
    port = site.host.rpartition(":")[2]
    for host in (site.host, f"localhost:{port}", f"2130706433:{port}", f"0x7f.1:{port}", f"[::1]:{port}"):
        message = await refused(by_url(f"http://{host}/file"), hosts=rules(f"*:{port}"))
        assert "no public address" in message or "could not be fetched" in message
    assert site.connections == 0


@pytest.mark.parametrize(
    "url",
    [
        "",
        "file:///etc/passwd",
        "ftp://127.0.0.1/x",
        "//127.0.0.1/x",
        "http:///x",
        "http://user@{host}/file",
        "http://user:secret@{host}/file",
        "http://{host}:1/file",
        "http://[::1/x",
        "http://127.0.0.1:99999/x",
        "gopher://{host}/file",
        "http://{host}.example.org/file",
        "http://example.org@{host}.example.org/",
        "http://example.org\\@{host}/file",
    ],
)
async def test_urls_that_are_not_what_they_seem(site: Site, url: str) -> None:
    message = await refused(by_url(url.format(host=site.host)), hosts=rules(site.host))
    assert message.startswith("media[0].url: ")
    assert "secret" not in message
    assert site.connections == 0


async def test_redirects_are_followed_a_little(site: Site) -> None:
    (media,) = await load(by_url(site.url("/hop/3")), hosts=rules(site.host))
    assert media.data == b"there"
    for path in ("/hop/4", "/loop"):
        assert "redirects more than 3 times" in await refused(by_url(site.url(path)), hosts=rules(site.host))


async def test_redirects_are_checked_again(site: Site) -> None:
    with Site() as other:
        for where in (other.url("/file"), "http://localhost/x", "file:///etc/passwd", "//127.0.0.1:1/x"):
            message = await refused(by_url(site.url(f"/to/{where}")), hosts=rules(site.host))
            assert "not among the hosts" in message or "must be an http" in message
        assert other.connections == 0


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/missing", "status 404"),
        ("/empty", "holds no bytes"),
        ("/short", "3 of 9 bytes"),
        ("/gzip", "compressed"),
        ("/big/1001", "more than the 1000 bytes"),
        ("/endless", "more than the 1000 bytes"),
    ],
)
async def test_answers_that_are_no_file(site: Site, path: str, says: str) -> None:
    assert says in await refused(by_url(site.url(path)), hosts=rules(site.host), max_bytes=1000)


async def test_a_file_of_the_limit_is_fetched(site: Site) -> None:
    (media,) = await load(by_url(site.url("/big/1000")), hosts=rules(site.host), max_bytes=1000)
    assert len(media.data) == 1000


@pytest.mark.parametrize("path", ["/silent", "/drip"])
async def test_a_slow_host_is_given_up(site: Site, path: str) -> None:
    """In all, not for each byte; and no thread stays behind."""
    before = threading.active_count()
    message = await refused(by_url(site.url(path)), hosts=rules(site.host), timeout_s=0.3)
    assert "within 0.3 s" in message
    site.leave.set()
    idle = asyncio.get_running_loop()._default_executor  # type: ignore[attr-defined]  # how else to ask
    await until(lambda: idle._idle_semaphore._value > 0)
    assert threading.active_count() <= before + 3


async def test_a_closed_port_is_a_refusal(site: Site) -> None:
    with Site() as closed:
        host = closed.host
    assert "could not be fetched" in await refused(by_url(f"http://{host}/file"), hosts=rules(host))


async def test_the_first_failure_ends_the_other_fetches(site: Site) -> None:
    items = [by_url(site.url("/silent")), by_url(site.url("/missing"))]
    assert "media[1].url" in await refused(*items, hosts=rules(site.host))


# --------------------------------------------------------------------------------------------------- hosts, options


@pytest.mark.parametrize(
    ("rule", "place", "matches"),
    [
        ("Example.org.", ("example.org", 80, "http"), True),
        ("example.org", ("example.org", 443, "https"), True),
        ("example.org", ("example.org", 8080, "http"), False),
        ("example.org", ("www.example.org", 80, "http"), False),
        ("example.org:8080", ("example.org", 8080, "http"), True),
        ("example.org:8080", ("example.org", 80, "http"), False),
        ("*.example.org", ("www.example.org", 443, "https"), True),
        ("*.example.org", ("example.org", 443, "https"), False),
        ("*.example.org", ("badexample.org", 443, "https"), False),
        ("*", ("example.org", 443, "https"), True),
        ("*", ("example.org", 444, "https"), False),
        ("[::1]:8000", ("::1", 8000, "http"), True),
        ("bücher.example", ("xn--bcher-kva.example", 80, "http"), True),
    ],
)
def test_host_rules(rule: str, place: tuple[str, int, str], matches: bool) -> None:
    assert HostRule.parse(rule).matches(*place) is matches


@pytest.mark.parametrize(
    "text", ["", "*.", "a*b", "*.*.org", "http://example.org", "example.org/x", "u@h", "h:x"]
)
def test_host_rules_that_are_none(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - some of the words are urllib's
        HostRule.parse(text)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::a00:1", False),
        ("64:ff9b::808:808", True),
        ("2002:7f00:1::", False),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public


async def test_the_checked_address_is_the_one_connected_to(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that answers differently the second time gains nothing."""
    asked = []

    async def lookup(self: Any, host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        return [(2, 1, 6, "", ("127.0.0.1", port))]

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(type(loop), "getaddrinfo", lookup)
    port = site.host.rpartition(":")[2]
    (media,) = await load(by_url(f"http://a.invalid:{port}/file"), hosts=rules(f"a.invalid:{port}"))
    assert media.data == b"file"
    assert asked == ["a.invalid"]
    assert "no public" in await refused(by_url(f"http://a.invalid:{port}/file"), hosts=rules(f"*:{port}"))


def test_options() -> None:
    parsed = options.parse(
        ["--allow-media-host", "a.org", "--allow-media-host", "*.b.org:81", "--max-media-mib", "2"]
    )
    assert parsed.media.hosts == (HostRule("a.org"), HostRule("*.b.org", 81))
    assert (parsed.media.max_bytes, parsed.media.timeout_s) == (2 * 2**20, 10.0)
    assert options.parse([]).media.hosts == ()
    for bad in (["--allow-media-host", "http://a.org"], ["--max-media-mib", "0"], ["--media-timeout", "0"]):
        with pytest.raises(SystemExit):
            options.parse(bad)


# -------------------------------------------------------------------------------------------------------- Generate


@contextlib.asynccontextmanager
async def with_images(**policy: Any) -> Any:
    engine = FakeEngine(generation=GenerationSupport(modalities=frozenset({IMAGE})))
    engine.script = lambda call: [length_finish()]
    async with serve(engine) as served:
        served.servicer._media = MediaLoader(MediaPolicy(**policy))
        yield served


async def test_generate_hands_over_its_media() -> None:
    async with with_images() as served:
        media = [inputs_pb2.MediaItem(raw_bytes=b"1"), inputs_pb2.MediaItem(raw_bytes=b"2", uuid="u")]
        await served.collect(served.request(media=media))
        (call,) = served.engine.calls
        assert [(one.data, one.uuid, one.field) for one in call.media] == [
            (b"1", "", "media[0].raw_bytes"),
            (b"2", "u", "media[1].raw_bytes"),
        ]


async def test_generate_refuses_bad_media_before_acceptance() -> None:
    """MEDIA-02, MEDIA-03, ERR-01."""
    async with with_images() as served:
        for item, field in (
            (by_url("http://127.0.0.1/x"), "media[0].url"),
            (inputs_pb2.MediaItem(data_uri="data:x"), "media[0].data_uri"),
            (inputs_pb2.MediaItem(), "media[0]"),
            (inputs_pb2.MediaItem(modality=inputs_pb2.MODALITY_VIDEO, raw_bytes=b"x"), "media[0].modality"),
        ):
            code, details = await served.refused(served.stub.Generate(served.request(media=[item])))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert details.startswith(field)
        assert not served.engine.calls


async def test_abort_ends_a_fetch(site: Site) -> None:
    async with with_images(hosts=rules(site.host)) as served:
        call = served.stub.Generate(served.request(media=[by_url(site.url("/silent"))]))
        await until(lambda: bool(site.paths))
        await served.stub.Abort(lifecycle_pb2.AbortRequest(request_id="r1"))
        code, _ = await served.refused(call)
        assert code is grpc.StatusCode.CANCELLED
        assert not served.engine.calls


def test_bounds_are_what_the_documentation_says() -> None:
    assert (fetch.MAX_REDIRECTS, MediaPolicy().max_bytes, MediaPolicy().timeout_s) == (3, 64 * 2**20, 10.0)
