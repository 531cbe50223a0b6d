"""Whether work grows in step with its input, told by comparing two sizes on the same machine."""

from __future__ import annotations

import time
from collections.abc import Callable


def assert_linear(work: Callable[[str], object], made: Callable[[int], str], size: int) -> None:
    """Four times the input takes about four times the time; quadratic work would take sixteen."""
    small, large = (_seconds(work, made(each)) for each in (size // 4, size))
    assert large < 8 * small + 0.25, f"{small:.2f} s became {large:.2f} s"


def _seconds(work: Callable[[str], object], text: str) -> float:
    """Processor time, the better of two: what else the machine does is not counted."""
    taken = []
    for _ in range(2):
        began = time.process_time()
        work(text)
        taken.append(time.process_time() - began)
        if taken[0] > 0.3:
            break
    return min(taken)
