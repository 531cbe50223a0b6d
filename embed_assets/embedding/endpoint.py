"""One endpoint: requests sent until they succeed or there is no use, and what was learned of it.

Belongs here: attempts, waits, whether it still serves the same vector space, whether it works at all. Does
not: dividing requests to find a guilty text (`client.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from urllib.parse import urljoin

from embed_assets.embedding.batches import Limits, Pace
from embed_assets.embedding.faults import LONGEST_WAIT, Fault, broken_answer, other_model
from embed_assets.embedding.protocols import Answer, BadAnswer, Tei, Wire, parsed
from embed_assets.embedding.transport import Transport

PROBE = "probe"
CREDIT = 8  # verdicts on texts that one good answer of the endpoint vouches for
INFO_SECONDS = 5.0


class Endpoint:
    """Asks for vectors. `dimensions` and `reported_model` are what every answer must agree with."""

    def __init__(
        self,
        transport: Transport,
        wire: Wire,
        *,
        limits: Limits,
        pace: Pace,
        dimensions: int | None,
        retry_base: float,
    ) -> None:
        self.limits = limits
        self.dimensions = dimensions
        self.reported_model: str | None = None
        self.url = transport.shown
        self.shown = f"the embedding endpoint {self.url}"
        self._transport, self._wire, self._pace, self._retry_base = transport, wire, pace, retry_base
        self._asks_info = isinstance(wire, Tei) and transport.url.endswith("/embed")
        self._credit = 0

    async def ask(self, texts: list[str], *, suspect: bool = False, used: int = 0) -> Answer:
        """One request, sent again while that is worth it; `used` attempts are gone. Raises the last Fault."""
        for attempt in itertools.count(used + 1):
            try:
                return await self._once(texts)
            except Fault as fault:
                fault.attempt = attempt
                if not self._again(fault, suspect, len(texts)):
                    raise
                pause = self._retry_base * 2 ** (attempt - 1) * random.uniform(0.8, 1.2)
                await asyncio.sleep(max(pause, fault.retry_after or 0))
        raise AssertionError("unreachable")

    async def vouch(self) -> None:
        """A text is only blamed while the endpoint takes other texts; else every text would be to blame.

        Raises EndpointTrouble.
        """
        if self._credit <= 0:
            await self.probe()
        self._credit -= 1

    async def probe(self) -> None:
        """One text that nobody can object to. Raises EndpointTrouble."""
        try:
            await self.ask([PROBE], suspect=True)
        except Fault as fault:
            raise fault.trouble(self.shown) from None

    async def learn_limits(self) -> None:
        """What Text Embeddings Inference says of itself, once; what others take is found out by trying."""
        if not self._asks_info:
            return
        self._asks_info = False
        try:
            info = parsed(await self._transport.get(urljoin(self._transport.url, "info"), seconds=INFO_SECONDS))
        except (Fault, BadAnswer):
            return
        items = info.get("max_client_batch_size") if isinstance(info, dict) else None
        self.limits.lower(items=items if type(items) is int else None)

    async def close(self) -> None:
        await self._transport.close()

    @staticmethod
    def _again(fault: Fault, suspect: bool, count: int) -> bool:
        """A slow request is halved first; a server that wants a long rest gets it."""
        if fault.attempt >= fault.allowed(suspect=suspect, alone=count == 1):
            return False
        return (fault.retry_after or 0) <= LONGEST_WAIT and (fault.code != "timeout" or count == 1)

    async def _once(self, texts: list[str]) -> Answer:
        await asyncio.sleep(self._pace.reserve(sum(map(len, texts)) / 4, time.monotonic()))
        content, headers = await self._transport.post(self._wire.body(texts))
        try:
            answer = self._wire.answer(content, len(texts), headers)
        except BadAnswer as bad:
            raise broken_answer(bad.code, repairable=bad.code == "invalid_json") from None
        self._accept(answer)
        return answer

    def _accept(self, answer: Answer) -> None:
        """Is it the vector space that was agreed? Raises Fault."""
        count, width = answer.vectors.shape
        if answer.model and answer.model != (self.reported_model or answer.model):
            raise other_model("model_changed")
        if width != (self.dimensions or width):
            raise other_model("wrong_width") if count > 1 else broken_answer("wrong_width")
        self.reported_model = answer.model or self.reported_model
        self.dimensions = width
        self._credit = CREDIT
