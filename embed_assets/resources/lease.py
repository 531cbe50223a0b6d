"""The heartbeat: one thread that renews every wave this process holds, for as long as the process lives.

A refusal ends the wave's work; a lock time-out or a lost connection does not. When no renewal succeeded for a
whole lease, the process fences itself: the database will have given the wave away.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from embed_assets.models import Wave
from embed_assets.resources.outbox import Outbox
from embed_assets.stop import Stop

logger = logging.getLogger(__name__)

TICK_SECONDS = 1.0


class LeaseKeeper:
    """Holds waves of one outbox. `hold` before work, `drop` when the wave is closed; `close` ends the thread."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._held: dict[int, tuple[UUID, Stop, float]] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def hold(self, wave: Wave, scope: Stop) -> None:
        """Renew from now on; `scope.lose()` is called when the lease is refused."""
        with self._lock:
            self._held[wave.wave_id] = (wave.token, scope, time.monotonic())
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)
                self._thread.start()

    def drop(self, wave: Wave) -> None:
        """Stop renewing: the wave is closed, or is left to lapse."""
        with self._lock:
            self._held.pop(wave.wave_id, None)

    @contextmanager
    def holding(self, wave: Wave, scope: Stop) -> Iterator[Stop]:
        self.hold(wave, scope)
        try:
            yield scope
        finally:
            self.drop(wave)

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    def beat(self) -> bool:
        """Renew everything once; whoever is refused, or has gone a whole lease without renewal, loses.

        Returns whether the database answered.
        """
        with self._lock:
            held = dict(self._held)
        if not held:
            return True
        asked = time.monotonic()
        try:
            refused = self._outbox.renew({wave_id: token for wave_id, (token, _, _) in held.items()})
        except Exception as error:  # the database's trouble is no refusal; the terminal fence decides
            logger.warning("%s: heartbeat failed (%s), tried again", self._outbox.kind, type(error).__name__)
            refused = {w for w, (_, _, last) in held.items() if asked - last > self._outbox.lease_seconds}
            answered = False
        else:
            answered = True
            self._renewed(set(held) - refused, asked)
        self._lose(held, refused)
        return answered

    def _renewed(self, wave_ids: set[int], at: float) -> None:
        with self._lock:
            for wave_id in wave_ids & set(self._held):
                token, scope, _ = self._held[wave_id]
                self._held[wave_id] = (token, scope, at)

    def look(self) -> None:
        """Whether a wave was taken from us since the last beat; its work ends."""
        with self._lock:
            held = dict(self._held)
        if not held:
            return
        try:
            lost = self._outbox.lost({wave_id: token for wave_id, (token, _, _) in held.items()})
        except Exception:  # the next beat speaks of the database's trouble
            return
        self._lose(held, lost)

    def _lose(self, held: dict[int, tuple[UUID, Stop, float]], wave_ids: set[int]) -> None:
        for wave_id in wave_ids:
            logger.warning("%s: the lease of wave %s is lost", self._outbox.kind, wave_id)
            held[wave_id][1].lose()

    def _run(self) -> None:
        # A beat each third of the lease; one that failed is repeated at the next tick: a third later would be too
        # late for the one after it. In between a look each second, so that a loss ends the work at once.
        third = self._outbox.lease_seconds / 3
        due = time.monotonic() + third
        while not self._wake.wait(min(TICK_SECONDS, third)):
            if time.monotonic() < due:
                self.look()
            elif self.beat():
                due = time.monotonic() + third
