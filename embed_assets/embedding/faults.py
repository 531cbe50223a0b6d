"""What one failed attempt means: try again, split the request, blame a text or blame the endpoint.

Judged from the status and the kind of exception. The answer's own words only hint at a size or at loading;
they never reach a message, since servers like to quote the text they were sent.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Literal

from embed_assets.embedding.shared import Rest
from embed_assets.errors import (
    AnswerContract,
    ClassifiedError,
    EndpointTrouble,
    ErrorClass,
    InputRejected,
    InputTooLong,
)

ATTEMPTS = 5
REPEATS = 2  # of a request whose answer broke the contract, or of a text that stands alone under suspicion
LONGEST_WAIT = 60.0  # seconds; a server that wishes for more is left alone, and the caller told
LONGEST_WISH = 3600.0
RESTS = "resting"

ADVICE = {
    "http_401": "It does not take the key: check EMBED_API_KEY.",
    "http_403": "The key may not use it: check EMBED_API_KEY and what it is allowed.",
    "http_404": "There is nothing at that address, or no such model: check EMBED_URL and EMBED_MODEL.",
    "http_400": "It refuses even a harmless text: check EMBED_PROTOCOL and EMBED_MODEL.",
    "http_422": "It refuses even a harmless text: check EMBED_PROTOCOL and EMBED_MODEL.",
    "untrusted_certificate": "Nobody known has signed its certificate: check EMBED_CA_BUNDLE.",
    "connect": "Nothing answers at that address: check EMBED_URL, and that the server runs.",
    "wrong_width": "It serves another width than the vectors have: check EMBED_MODEL and EMBED_DIMENSIONS.",
    "model_changed": "It says it serves another model than before: set EMBED_MODEL to that one, so that "
    "everything is embedded anew; or, if it is the same under another name, run the job reset_endpoint.",
    "unknown_shape": "It speaks another protocol: check EMBED_PROTOCOL and the path in EMBED_URL.",
}

_BATCH_LIMIT = re.compile(
    r"(?:max(?:imum)?(?: allowed)? batch size|batch size.{0,40}(?:larger|greater|more) than"
    r"|array.{0,60}maximum length)(?: of| is)?:? *(\d+)",
    re.I,
)
_TOO_LONG = re.compile(r"less than \d+ (?:tokens|characters)|context.length|too long|maximum.{0,20}tokens", re.I)
_TOO_MANY_BYTES = re.compile(r"length limit|payload|entity too large|body.{0,20}(?:large|limit)", re.I)
_LOADING = re.compile(r"loading|estimated_time|warming|starting", re.I)
_ESTIMATE = re.compile(r'"estimated_time" *: *(\d+)')


@dataclass(eq=False)
class Fault(Exception):
    """One failed attempt. `error_class` is the class if the endpoint turns out to be at fault.

    `splits`: the request may have been too large, or one text guilty. `certain`: the answer says so itself,
    so that nobody need ask whether the endpoint works at all.
    """

    error_class: ErrorClass
    code: str
    tries: int = ATTEMPTS
    splits: bool = False
    certain: bool = False
    size: Literal["items", "bytes", "chars"] | None = None
    limit: int | None = None  # items, where the endpoint names the number
    text_error: type[ClassifiedError] = AnswerContract
    retry_after: float | None = None  # seconds
    attempt: int = 1

    def allowed(self, *, suspect: bool, alone: bool) -> int:
        """How often the request may be sent; parts of one that failed before are not nursed again."""
        if self.splits and suspect:
            return min(self.tries, REPEATS if alone else 1)
        return self.tries

    def trouble(self, where: str) -> EndpointTrouble:
        """The endpoint's fault, for the caller."""
        times = "once" if self.attempt == 1 else f"{self.attempt} times"
        advice = f". {ADVICE[self.code]}" if self.code in ADVICE else ""
        return EndpointTrouble(
            f"{where} failed {times}, last with {self.code}{advice}",
            error_class=self.error_class,
            code=self.code,
            retry_after=self.retry_after,
        )

    def verdict(self, where: str) -> ClassifiedError:
        """The text's fault, for the caller."""
        return self.text_error(f"{where} does not take this text alone either: {self.code}", code=self.code)


def broken_answer(code: str, *, repairable: bool = False) -> Fault:
    """An answer against the contract; a cut or unreadable one is `repairable` and tried like a lost one."""
    error_class = ErrorClass.UNAVAILABLE if repairable else ErrorClass.CONTRACT
    return Fault(error_class, code, tries=ATTEMPTS if repairable else REPEATS, splits=True)


def other_model(code: str) -> Fault:
    """The endpoint serves another vector space: nothing it answers may be used."""
    return Fault(ErrorClass.CONTRACT, code, tries=1)


def timed_out() -> Fault:
    """Our own timeout. The request is halved before it is sent again."""
    return Fault(ErrorClass.UNAVAILABLE, "timeout", splits=True, certain=True, size="chars")


def lost(code: str) -> Fault:
    """No connection, or one that broke before an answer came."""
    return Fault(ErrorClass.UNAVAILABLE, code)


def untrusted() -> Fault:
    """A certificate that nobody we trust has signed."""
    return Fault(ErrorClass.REFUSED, "untrusted_certificate", tries=1)


def resting(rest: Rest) -> Fault:
    """Nothing was sent, since another process met trouble that lasts longer than a request can wait."""
    error_class = ErrorClass.WARMING if rest.state == "warming" else ErrorClass.UNAVAILABLE
    return Fault(error_class, RESTS, tries=1, retry_after=rest.seconds)


def asleep(fault: Fault) -> Fault:
    """A 503 of an endpoint that is stopped while nobody asks it means that it is being started."""
    if fault.code == "http_503":
        fault.error_class, fault.tries = ErrorClass.WARMING, 1
    return fault


def from_status(status: int, headers: Mapping[str, str], content: bytes) -> Fault:
    """An answer other than 200."""
    words = content[:4000].decode("utf-8", "replace")
    code = f"http_{status}"
    wish = retry_after(headers.get("retry-after"), time.time())
    if status == 429:
        return Fault(ErrorClass.RATE_LIMITED, code, retry_after=wish)
    if status in (400, 413, 422):
        return _refused_input(status, code, words)
    if status >= 500 or status in (408, 409, 424, 425):
        if status == 503 and _LOADING.search(words):  # it takes minutes: the waiting is the caller's
            estimate = _ESTIMATE.search(words)
            wish = wish or (float(estimate[1]) if estimate else None)
            return Fault(ErrorClass.WARMING, code, tries=1, retry_after=wish)
        return Fault(ErrorClass.UNAVAILABLE, code, splits=status in (424, 500), retry_after=wish)
    return Fault(ErrorClass.REFUSED, code, tries=1)


def _refused_input(status: int, code: str, words: str) -> Fault:
    """400, 413, 422: too many texts, too long a text, or a text that the endpoint does not like."""
    batch_limit, too_long = _BATCH_LIMIT.search(words), _TOO_LONG.search(words)
    fault = Fault(ErrorClass.REFUSED, code, tries=1, splits=True, certain=True)
    fault.text_error = InputTooLong if too_long or status != 400 else InputRejected
    if batch_limit:
        fault.size, fault.limit = "items", int(batch_limit[1])
    elif too_long:
        fault.size = "chars"
    elif _TOO_MANY_BYTES.search(words):
        fault.size = "bytes"
    else:
        fault.size, fault.certain = "items", False
    return fault


def retry_after(value: str | None, now: float) -> float | None:
    """Seconds from now (a Unix time) of a Retry-After header in either form; None for nonsense or the past."""
    if not value:
        return None
    try:
        seconds = float(value) if value.strip().isdecimal() else parsedate_to_datetime(value).timestamp() - now
    except (ValueError, TypeError, OverflowError):
        return None
    return min(seconds, LONGEST_WISH) if seconds > 0 else None
