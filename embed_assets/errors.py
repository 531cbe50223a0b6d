"""Everything that can go wrong, and who pays for it.

One table decides (`RULES`): for each error class, whether the entry is charged an attempt and
whether another attempt could ever succeed. What does not belong here: how an error is found
(the client, the resources) and what is then written (`resources/outbox.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ErrorClass(str, Enum):
    """The stable names that stand in `semantic_outbox.error_class` and in the log."""

    RATE_LIMITED = "rate_limited"
    UNAVAILABLE = "unavailable"
    WARMING = "warming"
    REFUSED = "refused"
    CONTRACT = "contract"
    INPUT_REJECTED = "input_rejected"
    TOO_LARGE = "too_large"
    CORRUPT_ROW = "corrupt_row"
    ROW_REJECTED = "row_rejected"
    LEASE_ATTEMPTS_EXHAUSTED = "LEASE_ATTEMPTS_EXHAUSTED"
    DATABASE = "database"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    LEASE_LOST = "lease_lost"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Rule:
    """What a failure of one class costs the entry: `charges` an attempt; `deterministic` is dead at once."""

    charges: bool
    deterministic: bool = False


RULES: dict[ErrorClass, Rule] = {
    ErrorClass.RATE_LIMITED: Rule(charges=False),
    ErrorClass.UNAVAILABLE: Rule(charges=False),
    ErrorClass.WARMING: Rule(charges=False),
    ErrorClass.REFUSED: Rule(charges=False),
    ErrorClass.CONTRACT: Rule(charges=True),
    ErrorClass.INPUT_REJECTED: Rule(charges=True, deterministic=True),
    ErrorClass.TOO_LARGE: Rule(charges=True, deterministic=True),
    ErrorClass.CORRUPT_ROW: Rule(charges=True, deterministic=True),
    ErrorClass.ROW_REJECTED: Rule(charges=True),
    ErrorClass.LEASE_ATTEMPTS_EXHAUSTED: Rule(charges=True, deterministic=True),
    ErrorClass.DATABASE: Rule(charges=False),
    ErrorClass.TIMEOUT: Rule(charges=False),
    ErrorClass.CANCELLED: Rule(charges=False),
    ErrorClass.LEASE_LOST: Rule(charges=False),
}


class EmbedAssetsError(Exception):
    """Base of every error of ours. The message says what, where and what to do, in one paragraph."""


class ConfigurationError(EmbedAssetsError):
    """A setting, a declaration or the surroundings are wrong; nothing was changed."""


class DeclarationError(ConfigurationError):
    """A corpus was declared that cannot be maintained; names the field at fault."""


class ClassifiedError(EmbedAssetsError):
    """An error of a known class. `code` is stable and short; the message never holds source text."""

    error_class: ErrorClass
    code: str

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code or str(self.error_class)


class EndpointTrouble(ClassifiedError):
    """The endpoint, not a text, is at fault: no entry is charged, the endpoint rests, the wave is released.

    `retry_after` is the server's own wish in seconds, when it made one.
    """

    def __init__(
        self,
        message: str,
        *,
        error_class: ErrorClass,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        self.error_class = error_class
        super().__init__(message, code=code)
        self.retry_after = retry_after


class AnswerContract(ClassifiedError):
    """An answer broke the contract (count, order, width, NaN, zero) for these texts, alone too."""

    error_class = ErrorClass.CONTRACT


class InputRejected(ClassifiedError):
    """The endpoint will never take this text."""

    error_class = ErrorClass.INPUT_REJECTED


class InputTooLong(InputRejected):
    """One text is over the endpoint's token limit: the row must be chunked smaller."""


class TooLarge(ClassifiedError):
    """A row is over 2 M characters or would make more than 32,768 chunks."""

    error_class = ErrorClass.TOO_LARGE


class CorruptRow(ClassifiedError):
    """Postgres cannot read the row (XX001)."""

    error_class = ErrorClass.CORRUPT_ROW


class RowRejected(ClassifiedError):
    """The database refuses to read or write this one row: a trigger, a constraint, a cast in the declaration."""

    error_class = ErrorClass.ROW_REJECTED


class DatabaseTrouble(ClassifiedError):
    """Deadlock, serialization failure or a lost connection, after it was retried."""

    error_class = ErrorClass.DATABASE


class WaveTimeout(ClassifiedError):
    """The wave's budget (EMBED_CALL_TIMEOUT_SECONDS) is used up."""

    error_class = ErrorClass.TIMEOUT


class Cancelled(ClassifiedError):
    """Somebody ended the run: nothing is charged, every lease is given back."""

    error_class = ErrorClass.CANCELLED


class LeaseLost(ClassifiedError):
    """The wave is closed, expired or another's: nothing may be written under it."""

    error_class = ErrorClass.LEASE_LOST
