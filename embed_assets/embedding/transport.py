"""One request at a time over HTTP, on an event loop of its own thread.

Belongs here: connections, timeouts, headers, what the user may see of the URL. Does not: whether to try
again, and what an answer says.

A loop of its own, so that a cancelled caller leaves at once while requests are in flight, and so that the
clock of an attempt does not run against time that the caller spends elsewhere.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import threading
import zlib
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from embed_assets.embedding.faults import broken_answer, from_status, lost, timed_out, untrusted
from embed_assets.errors import Cancelled, ConfigurationError

T = TypeVar("T")
CONNECT_SECONDS = 10.0
CLOSE_SECONDS = 5.0
LONGEST_ANSWER = 128_000_000  # bytes, unpacked: 1,000 vectors of 3,072 dimensions in JSON are 70 MB


class LoopThread:
    """An event loop in a daemon thread; started at the first use, ended for good by `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Raises Cancelled after `close`. Work that `close` overtakes ends as a cancelled future."""
        with self._lock:
            if self._closed:
                work.close()
                raise Cancelled("the embedder is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_serve, args=(self._loop,), name="embedding", daemon=True).start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel what runs, run `last`, end the thread."""
        with self._lock:
            self._closed, loop, self._loop = True, self._loop, None
        if loop is None:
            last.close()
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result(CLOSE_SECONDS)
        asyncio.run_coroutine_threadsafe(last, loop).result(CLOSE_SECONDS)
        loop.call_soon_threadsafe(loop.stop)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Transport:
    """Requests to one endpoint. Every way to fail is a `Fault`; the key is in none of them."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        headers: Mapping[str, str],
        attempt_timeout: float,
        ca_bundle: str | None,
        proxy: str | None,
    ) -> None:
        self.url, self.shown = _checked(url), shown_url(url)
        self._seconds = attempt_timeout
        always = {"Content-Type": "application/json", "Accept-Encoding": "gzip"}
        self._headers = {**always, **_sendable(headers), **_authorization(api_key)}
        self._proxy = _proxy(proxy)
        self._verify = _trust(ca_bundle) if url.startswith("https:") else False  # reading all CAs takes 30 ms
        self._client: httpx.AsyncClient | None = None

    async def post(self, body: bytes) -> tuple[bytes, Mapping[str, str]]:
        """Content and headers of a 2xx answer. Raises Fault."""
        return await self._within(self._exchange("POST", self.url, body), self._seconds)

    async def get(self, url: str, *, seconds: float) -> bytes:
        """Content of a 2xx answer. Raises Fault."""
        content, _ = await self._within(self._exchange("GET", url, None), min(seconds, self._seconds))
        return content

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _within(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """Its result, if that comes in time. Unlike asyncio.wait_for of 3.10 it never swallows a cancellation."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task}, timeout=seconds)
            if not task.done():
                raise timed_out()
            return task.result()
        finally:
            while not task.done():  # until it is: on Python 3.10 a connection being made can swallow the first
                task.cancel()
                await asyncio.wait({task}, timeout=0.05)
            if not task.cancelled():
                task.exception()  # seen, or asyncio logs that nobody looked

    async def _exchange(self, method: str, url: str, body: bytes | None) -> tuple[bytes, Mapping[str, str]]:
        try:
            async with self._open().stream(method, url, content=body, headers=self._headers) as response:
                content = await self._content(response)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise untrusted() if "CERTIFICATE_VERIFY_FAILED" in str(error) else lost("connect") from None
        except (httpx.TransportError, httpx.StreamError):
            raise lost("connection_lost") from None
        if not response.is_success:
            raise from_status(response.status_code, response.headers, content)
        return content, response.headers

    async def _content(self, response: httpx.Response) -> bytes:
        """The body, unpacked by ourselves: httpx unpacks whatever comes, and a bomb of 1 MB takes a gigabyte."""
        raw = bytearray()
        try:
            async for part in response.aiter_raw():
                raw += part
                if len(raw) > LONGEST_ANSWER:
                    raise broken_answer("answer_too_long")
        except (httpx.TransportError, httpx.StreamError):
            raise broken_answer("cut_body", repairable=True) from None
        return _unpacked(bytes(raw), response.headers.get("content-encoding", ""))

    def _open(self) -> httpx.AsyncClient:
        if self._client is None:
            timeout = httpx.Timeout(None, connect=min(CONNECT_SECONDS, self._seconds / 2))  # the whole: `_within`
            # A key goes before the user in an address, which httpx would otherwise make into the same header.
            auth = httpx.Auth() if any(name.lower() == "authorization" for name in self._headers) else None
            self._client = httpx.AsyncClient(timeout=timeout, verify=self._verify, proxy=self._proxy, auth=auth)
        return self._client


def _unpacked(raw: bytes, encoding: str) -> bytes:
    if encoding.lower() not in ("gzip", "x-gzip"):
        return raw
    unpacking = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        content = unpacking.decompress(raw, LONGEST_ANSWER)
    except zlib.error:
        raise broken_answer("cut_body", repairable=True) from None
    if unpacking.unconsumed_tail:
        raise broken_answer("answer_too_long")
    if not unpacking.eof:
        raise broken_answer("cut_body", repairable=True)
    return content


def shown_url(url: str) -> str:
    """The URL without user, password, query and fragment, any of which may hold a secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _checked(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigurationError("EMBED_URL is not an http or https address: write it like http://host:port/embed")
    return url


def _proxy(url: str | None) -> httpx.Proxy | None:
    try:
        return httpx.Proxy(url) if url else None
    except (ValueError, httpx.InvalidURL):
        raise ConfigurationError("the proxy for the embedding endpoint is not a proxy's address") from None


def _trust(ca_bundle: str | None) -> ssl.SSLContext | bool:
    try:
        return ssl.create_default_context(cafile=ca_bundle) if ca_bundle else True
    except OSError as error:
        raise ConfigurationError(f"the CA bundle {ca_bundle} cannot be read: {error}") from None


def _sendable(headers: Mapping[str, str]) -> Mapping[str, str]:
    for name, value in headers.items():
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) or re.search(r"[^\x20-\x7e\t]", value):
            raise ConfigurationError("EMBED_HEADERS holds a name or a value that no HTTP header can carry")
    return headers


def _authorization(api_key: str | None) -> dict[str, str]:
    """The Bearer header, of any length, or nothing without a key."""
    key = (api_key or "").strip()
    if re.search(r"[^\x21-\x7e]", key):
        raise ConfigurationError("EMBED_API_KEY holds a character that no HTTP header can carry")
    return {"Authorization": f"Bearer {key}"} if key else {}
