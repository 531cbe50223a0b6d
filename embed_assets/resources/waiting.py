"""Waiting for work in a thread, so that whoever ends the run is heard at once.

Signals reach only the main thread, and only between two steps of the interpreter: a main thread that sits in
a database call or in a model's arithmetic is deaf. So it waits here, in slices, and the work runs elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from embed_assets.stop import Stop

T = TypeVar("T")

SLICE_SECONDS = 0.2
PATIENCE_SECONDS = 3


class _Worker(Generic[T]):
    """Not joined but asked by an event: a join that is interrupted takes the thread for ended (CPython 3.10–3.12)."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._ended = threading.Event()
        self._results: list[T] = []
        self._error: BaseException | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, name="stage", daemon=True).start()

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def ended(self, seconds: float) -> bool:
        return self._ended.wait(seconds)

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._results[0]


def interruptible(work: Callable[[], T], stop: Stop, cancel: Callable[[], None]) -> T:
    """Run `work` in a thread and wait for it; returns or raises what it does.

    When the waiting is interrupted (KeyboardInterrupt, or what Dagster raises on Terminate), `stop` is cancelled,
    `cancel` is called for what the database is doing, the thread gets three seconds, and the interrupt goes on.
    """
    worker = _Worker(work)
    try:
        worker.start()
        while not worker.ended(SLICE_SECONDS):
            pass
    except BaseException:
        stop.cancel()
        for _ in range(PATIENCE_SECONDS):
            cancel()
            if worker.ended(1.0):
                break
        raise
    return worker.result()
