"""Why work must end now: somebody cancelled, the lease is lost, or the wave's budget is used up.

Whoever works asks the state of this object, never the text or type of an error, to tell these
three from a fault. Every wait in the package goes through `Stop.sleep`, so none is deaf.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from embed_assets.errors import Cancelled, LeaseLost, WaveTimeout


class Stop:
    """A cancellation scope. `child` adds a wave's own lease and budget to the run's cancellation."""

    def __init__(self, parent: Stop | None = None, *, seconds: float | None = None) -> None:
        self._parent = parent
        self._cancelled = threading.Event()
        self._lost = threading.Event()
        self._deadline = None if seconds is None or seconds <= 0 else time.monotonic() + seconds

    def cancel(self) -> None:
        """End everything in this scope, charging nobody."""
        self._cancelled.set()

    def lose(self) -> None:
        """The lease is no longer ours."""
        self._lost.set()

    def child(self, *, seconds: float | None = None) -> Stop:
        """A scope inside this one with a budget of its own in seconds (None or ≤ 0: none)."""
        return Stop(self, seconds=seconds)

    def reason(self) -> Cancelled | LeaseLost | WaveTimeout | None:
        """The error to raise now, or None. The order matters: a cancelled wave is not a timed-out one."""
        parent = self._parent.reason() if self._parent else None
        if parent:
            return parent
        if self._cancelled.is_set():
            return Cancelled("the run was cancelled")
        if self._lost.is_set():
            return LeaseLost("the wave's lease is no longer ours")
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return WaveTimeout("the wave's time budget is used up")
        return None

    def check(self) -> None:
        """Raises Cancelled, LeaseLost or WaveTimeout when work must end."""
        if error := self.reason():
            raise error

    def sleep(self, seconds: float) -> None:
        """Wait, in slices of 0.1 s; raises like `check` as soon as work must end."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.check()
            time.sleep(min(0.1, left))
        self.check()

    @contextmanager
    def cancel_on_exit(self) -> Iterator[Stop]:
        """Cancel this scope when the block is left by an exception."""
        try:
            yield self
        except BaseException:
            self.cancel()
            raise
