"""The embedder behind an HTTP endpoint: several requests in flight, and whose fault it was when one fails.

Belongs here: workers, bisection down to a guilty text. Does not: attempts and waits (`endpoint.py`), what a
failure means (`faults.py`), the bytes on the wire (`protocols.py`, `transport.py`), sizes (`batches.py`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from embed_assets.embedding.batches import Limits, batches, halves, size_in_bytes
from embed_assets.embedding.endpoint import Endpoint
from embed_assets.embedding.faults import ATTEMPTS, Fault
from embed_assets.embedding.protocols import wire
from embed_assets.embedding.shared import Shared, Unshared
from embed_assets.embedding.transport import LoopThread, Transport
from embed_assets.embedding.types import Embedded, Rejected, Vectors, texts_given, unsendable
from embed_assets.errors import AnswerContract, Cancelled, ConfigurationError, EndpointTrouble, ErrorClass
from embed_assets.stop import Stop

_E5 = re.compile(r"(?:^|[^a-z0-9])\w*e5(?:[^a-z0-9]|$)", re.I)

Emit = Callable[["Embedded | Rejected | None"], None]


@dataclass(frozen=True)
class _Job:
    """One call of `embed`; None emitted is its end."""

    texts: list[str]
    emit: Emit


class HttpEmbedder:
    """Vectors from a `tei`, `hf` or `openai` endpoint. Safe to share between threads.

    `model` is the name sent where the protocol has one, `dimensions` the width to insist on (None: whatever
    the endpoint's first answer has). A `query_prefix` of None means `query: ` for models of the E5 family;
    `prefix_by_server`: the endpoint adds prefixes. `shared`: what other processes know of the endpoint.
    Raises ConfigurationError for settings that cannot work.
    """

    def __init__(
        self,
        protocol: str,
        url: str | None,
        *,
        identity: str,
        model: str | None = None,
        dimensions: int | None = None,
        send_dimensions: bool = False,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        request_items: int = 32,
        concurrency: int = 1,
        attempt_timeout: float = 60.0,
        retry_base: float = 1.0,
        query_prefix: str | None = None,
        prefix_by_server: bool = False,
        ca_bundle: str | None = None,
        proxy: str | None = None,
        shared: Shared | None = None,
    ) -> None:
        self.identity = identity
        width = dimensions if send_dimensions else None
        language = wire(protocol, model=model, dimensions=width, says_type=prefix_by_server)
        if not (url := url or language.default_url):
            raise ConfigurationError(f"the {protocol} protocol needs an address (EMBED_URL)")
        transport = Transport(
            url,
            api_key=api_key,
            headers=headers or {},
            attempt_timeout=attempt_timeout,
            ca_bundle=ca_bundle,
            proxy=proxy,
        )
        self._endpoint = Endpoint(
            transport,
            language,
            limits=Limits(items=request_items),
            shared=shared or Unshared(),
            dimensions=dimensions,
            retry_base=retry_base,
        )
        self._concurrency = max(1, concurrency)
        by_model = "query: " if _E5.search(identity) and not prefix_by_server else ""
        self._prefix = by_model if query_prefix is None else query_prefix
        self._loop = LoopThread()

    def __repr__(self) -> str:
        return f"<HttpEmbedder {self.identity} at {self._endpoint.url}>"

    @property
    def dimensions(self) -> int:
        """The width of the vectors; asks the endpoint when it was not told. Raises EndpointTrouble."""
        if self._endpoint.dimensions is None:
            self._loop.submit(self._endpoint.probe()).result()
        return self._endpoint.dimensions or 0

    @property
    def texts_sent(self) -> int:
        """See `Embedder.texts_sent`; questions and probes are counted too."""
        return self._endpoint.texts_sent

    @property
    def limits(self) -> Limits:
        """What one request may hold, as far as it is known by now."""
        return self._endpoint.limits

    @property
    def reported_model(self) -> str | None:
        """The model the endpoint says it serves; None until it answered, or where it does not say."""
        return self._endpoint.reported_model

    def embed(self, texts: Sequence[str], *, stop: Stop) -> Iterator[Embedded | Rejected]:
        """See `Embedder.embed`. Requests in flight are dropped when the iterator is closed or `stop` fires."""
        return self._results(texts_given(texts), stop)

    def embed_query(self, text: str, *, timeout: float) -> Vectors:
        """See `Embedder.embed_query`. Raises EndpointTrouble (`timeout`) after so many seconds."""
        for rejected in unsendable([text]):
            raise rejected.error
        work = self._loop.submit(self._endpoint.ask([self._prefix + text], query=True))
        try:
            vector: Vectors = work.result(timeout).vectors[0]
        except concurrent.futures.TimeoutError:
            work.cancel()
            raise _no_query_vector(self._endpoint.shown, timeout) from None
        except concurrent.futures.CancelledError:
            raise Cancelled("the embedder was closed") from None
        except Fault as fault:
            guilty = fault.text_error is not AnswerContract
            raise (fault.verdict if guilty else fault.trouble)(self._endpoint.shown) from None
        return vector

    def close(self) -> None:
        """End what is in flight and close the connections."""
        self._loop.close(self._endpoint.close())

    def _results(self, texts: list[str], stop: Stop) -> Iterator[Embedded | Rejected]:
        stop.check()
        results: queue.SimpleQueue[Embedded | Rejected | None] = queue.SimpleQueue()
        work = self._loop.submit(self._run(_Job(texts, results.put)))
        try:
            while result := _next(results, work, stop):
                yield result
            work.result()
        except concurrent.futures.CancelledError:
            raise Cancelled("the embedder was closed") from None
        finally:
            work.cancel()

    async def _run(self, job: _Job) -> None:
        try:
            await self._endpoint.learn_limits()
            rejected = unsendable(job.texts)
            for one in rejected:
                job.emit(one)
            left_out = {at for one in rejected for at in one.positions}
            sendable = [at for at in range(len(job.texts)) if at not in left_out]
            await self._in_flight(job, batches(job.texts, self.limits, sendable))
        finally:
            job.emit(None)

    async def _in_flight(self, job: _Job, requests: Iterator[list[int]]) -> None:
        """`concurrency` workers share the requests; the first that fails ends the others."""

        async def work() -> None:
            for positions in requests:
                for rejected in await self._resolve(job, positions):
                    job.emit(rejected)

        workers = [asyncio.ensure_future(work()) for _ in range(self._concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _resolve(
        self, job: _Job, positions: list[int], *, suspect: bool = False, used: int = 0
    ) -> list[Rejected]:
        """Embed these texts, in parts where need be; returns those that fail alone."""
        try:
            answer = await self._endpoint.ask([job.texts[at] for at in positions], suspect=suspect, used=used)
        except Fault as fault:
            return await self._divide(job, positions, fault)
        job.emit(Embedded(positions, answer.vectors, answer.tokens))
        return []

    async def _divide(self, job: _Job, positions: list[int], fault: Fault) -> list[Rejected]:
        """Whose fault was it? The endpoint's, a text's, which must then be found, or the size's."""
        slow = fault.code == "timeout"
        alone = len(positions) == 1
        if not fault.splits or (slow and (alone or fault.attempt >= ATTEMPTS)):
            raise fault.trouble(self._endpoint.shown)
        if not fault.certain:
            await self._endpoint.vouch()
        if alone:
            return [Rejected(positions, fault.verdict(self._endpoint.shown))]
        if slow or fault.limit:
            await self._lower(fault, [job.texts[at] for at in positions])
        rejected: list[Rejected] = []
        for part in self._parts(job, positions):
            rejected += await self._resolve(job, part, suspect=not fault.certain, used=fault.attempt if slow else 0)
        if not rejected and not fault.limit:
            await self._lower(fault, [job.texts[at] for at in positions])
        return rejected

    def _parts(self, job: _Job, positions: list[int]) -> Iterator[list[int]]:
        """As the limits have it at the time, but in any case smaller than the whole."""
        first = next(batches(job.texts, self.limits, positions))
        for group in [positions] if len(first) < len(positions) else halves(positions):
            yield from batches(job.texts, self.limits, group)

    async def _lower(self, fault: Fault, texts: list[str]) -> None:
        """Remember that so much at once was too much, and half of it may do."""
        parts = halves(texts)
        if fault.size == "items":
            await self._endpoint.lower(items=fault.limit or len(parts[0]))
        elif fault.size == "bytes":
            await self._endpoint.lower(bytes=max(sum(map(size_in_bytes, part)) for part in parts))
        elif fault.size == "chars":
            await self._endpoint.lower(chars=max(sum(map(len, part)) for part in parts))


def _next(
    results: queue.SimpleQueue[Embedded | Rejected | None], work: concurrent.futures.Future[None], stop: Stop
) -> Embedded | Rejected | None:
    """The next result as soon as it is there, None after the last; raises what `stop` raises."""
    while True:
        stop.check()
        try:
            return results.get(timeout=0.05)
        except queue.Empty:
            if work.done() and results.empty():
                return None


def _no_query_vector(where: str, seconds: float) -> EndpointTrouble:
    return EndpointTrouble(
        f"{where} gave no query vector within {seconds:g} s", error_class=ErrorClass.UNAVAILABLE, code="timeout"
    )
