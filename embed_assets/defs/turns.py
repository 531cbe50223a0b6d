"""What turned since somebody was last told: pure, and kept in a sensor's cursor until it is told.

A turn is from green to red or back. Each is told once, in order, and waits as long as nobody listens.
What does not belong here: looking and posting (`alerts`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

GREEN = "green"
MOST_WAITING = 100

Turn = dict[str, Any]


@dataclass(frozen=True)
class Seen:
    """`state`: green, or a word for red. `text` holds numbers and codes, never the id of a row."""

    state: str
    severity: str
    text: str


@dataclass
class Memory:
    """The cursor: the state of each thing as it was last noted, and the turns that nobody has taken yet."""

    states: dict[str, str] = field(default_factory=dict)
    waiting: list[Turn] = field(default_factory=list)
    number: int = 0

    @classmethod
    def read(cls, cursor: str | None) -> Memory:
        try:
            return cls(**json.loads(cursor or "{}"))
        except (TypeError, ValueError):
            return cls()

    def written(self) -> str:
        return json.dumps(asdict(self))

    def note(self, kind: str, seen: Mapping[str, Seen], at: str) -> None:
        """Note what turned. What is unknown is left out of `seen` and stays as it was; what is new was green.

        While as many wait as may, nothing is noted: later it turns from what was last noted.
        """
        for name, now in seen.items():
            was = self.states.get(name, GREEN)
            if was == now.state or len(self.waiting) >= MOST_WAITING:
                continue
            self.number += 1
            self.states[name] = now.state
            self.waiting.append(
                {
                    "number": self.number,
                    "kind": kind,
                    "name": name,
                    "state": now.state,
                    "was": was,
                    "severity": now.severity,
                    "text": f"{kind} {name}: {now.text}",
                    "at": at,
                }
            )

    def tell(self, post: Callable[[Turn], str | None]) -> tuple[int, str | None]:
        """Post what waits, the oldest first, until `post` says what went wrong. How many were taken, and that."""
        told = 0
        while self.waiting:
            if trouble := post(self.waiting[0]):
                return told, trouble
            del self.waiting[0]
            told += 1
        return told, None
