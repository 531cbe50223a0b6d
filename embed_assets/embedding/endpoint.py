"""One endpoint: requests sent until they succeed or there is no use, and what was learned of it.

Belongs here: attempts, waits, whether it still serves the same vector space, whether it works at all. Does
not: dividing requests to find a guilty text (`client.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import replace
from urllib.parse import urljoin

from embed_assets.embedding.batches import TOKEN_BYTES, Limits, tokens_of
from embed_assets.embedding.faults import LONGEST_WAIT, Fault, asleep, broken_answer, other_model, resting
from embed_assets.embedding.protocols import Answer, BadAnswer, Tei, Wire, parsed
from embed_assets.embedding.shared import Shared
from embed_assets.embedding.transport import Transport
from embed_assets.errors import ErrorClass

PROBE = "probe"
PATIENCE = 50  # good answers after which requests that were made small by a time-out become larger again
CREDIT = 8  # verdicts on texts that one good answer of the endpoint vouches for
INFO_SECONDS = 5.0


def _number(info: object, name: str) -> int | None:
    found = info.get(name) if isinstance(info, dict) else None
    return found if type(found) is int else None


class Endpoint:
    """Asks for vectors. `dimensions` and `reported_model` are what every answer must agree with."""

    def __init__(
        self,
        transport: Transport,
        wire: Wire,
        *,
        limits: Limits,
        shared: Shared,
        dimensions: int | None,
        retry_base: float,
    ) -> None:
        self.limits, self._most = limits, replace(limits)
        self._in_time = 0  # good answers since the last time-out
        self.dimensions = dimensions
        self.reported_model: str | None = None
        self.url = transport.shown
        self.shown = f"the embedding endpoint {self.url}"
        self.texts_sent = 0  # texts, each as often as it was sent
        self._transport, self._wire, self._shared, self._retry_base = transport, wire, shared, retry_base
        self._says_info = isinstance(wire, Tei) and transport.url.endswith("/embed")
        self._knows_limits = False
        self._credit = 0

    async def ask(self, texts: list[str], *, suspect: bool = False, used: int = 0, query: bool = False) -> Answer:
        """One request, sent again while that is worth it; `used` attempts are gone. Raises the last Fault."""
        for attempt in itertools.count(used + 1):
            try:
                return await self._once(texts, query)
            except Fault as fault:
                fault.attempt = attempt
                if not self._again(fault, suspect, len(texts)):
                    raise
                pause = self._retry_base * 2 ** (attempt - 1) * random.uniform(0.8, 1.2)
                await self._pause(fault, max(pause, fault.retry_after or 0))
        raise AssertionError("unreachable")

    async def _pause(self, fault: Fault, seconds: float) -> None:
        """Where the server asked to be left alone, all processes leave it alone, from now on."""
        if fault.error_class is ErrorClass.RATE_LIMITED or fault.retry_after:
            await asyncio.to_thread(self._shared.rest, fault.trouble(self.shown), seconds=seconds)
        await asyncio.sleep(seconds)

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
        """Once: what earlier processes learned, and what Text Embeddings Inference says of itself.

        What others take is found out by trying. Raises EndpointTrouble when it says it serves another model.
        """
        if self._knows_limits:
            return
        if known := await asyncio.to_thread(self._shared.known_limits):
            self.limits.lower(items=known.items, bytes=known.bytes, chars=known.chars)
        if self._says_info:
            await self._ask_info()
        self._knows_limits = True

    async def _ask_info(self) -> None:
        try:
            info = parsed(await self._transport.get(urljoin(self._transport.url, "info"), seconds=INFO_SECONDS))
        except (Fault, BadAnswer):
            return
        items, tokens = (_number(info, name) for name in ("max_client_batch_size", "max_batch_tokens"))
        await self.lower(items=items, bytes=tokens and tokens * TOKEN_BYTES)
        if isinstance(info, dict) and isinstance(info.get("model_id"), str):
            try:
                await self._agree(info["model_id"])
            except Fault as fault:
                raise fault.trouble(self.shown) from None

    async def lower(self, **limits: int | None) -> None:
        """Remember that a request may hold no more, here and for the next process."""
        self._in_time = 0
        if self.limits.lower(**limits):
            await asyncio.to_thread(self._shared.learn, self.limits)

    async def close(self) -> None:
        await self._transport.close()

    @staticmethod
    def _again(fault: Fault, suspect: bool, count: int) -> bool:
        """A slow request is halved first; a server that wants a long rest gets it."""
        if fault.attempt >= fault.allowed(suspect=suspect, alone=count == 1):
            return False
        return (fault.retry_after or 0) <= LONGEST_WAIT and (fault.code != "timeout" or count == 1)

    async def _once(self, texts: list[str], query: bool) -> Answer:
        body = self._wire.body(texts, query=query)
        await self._place(tokens_of(texts))
        self.texts_sent += len(texts)
        try:
            content, headers = await self._transport.post(body)
        except Fault as fault:
            raise asleep(fault) if self._wire.scales_to_zero else fault from None
        try:
            answer = self._wire.answer(content, len(texts), headers)
        except BadAnswer as bad:
            raise broken_answer(bad.code, repairable=bad.code == "invalid_json") from None
        if answer.model:
            await self._agree(answer.model)
        self._accept(answer)
        await self._widen()
        return answer

    async def _widen(self) -> None:
        self._in_time += 1
        if self._in_time >= PATIENCE and self.limits.chars < self._most.chars:
            self._in_time = 0
            self.limits.widen(self._most)
            await asyncio.to_thread(self._shared.learn, self.limits)

    async def _place(self, tokens: int) -> None:
        """Wait until the endpoint may be asked, by what all processes know. Raises Fault when it rests for long.

        One that refused is asked all the same: whoever got here knows of that, and may have mended it.
        """
        paced = False
        while True:
            rest = await asyncio.to_thread(self._shared.resting)
            if rest and rest.state != "refused":
                if rest.seconds > LONGEST_WAIT:
                    raise resting(rest)
                await asyncio.sleep(rest.seconds + random.uniform(0, 0.1))
                continue
            if paced:
                return
            paced = True
            if (seconds := await asyncio.to_thread(self._shared.pace, tokens)) <= 0:
                return
            await asyncio.sleep(seconds)

    async def _agree(self, reported: str) -> None:
        """Is it the model that this endpoint first said it serves, to whichever process? Raises Fault."""
        if reported == self.reported_model:
            return
        if await asyncio.to_thread(self._shared.agree, reported) != reported:
            raise other_model("model_changed")
        self.reported_model = reported

    def _accept(self, answer: Answer) -> None:
        """Is it the vector space that was agreed? Raises Fault."""
        count, width = answer.vectors.shape
        if width != (self.dimensions or width):
            raise other_model("wrong_width") if count > 1 else broken_answer("wrong_width")
        self.dimensions = width
        self._credit = CREDIT
