"""Small pictures for the asset page, as PNG in markdown: no drawing library, and a legend that is text.

What does not belong here: what is shown (`resources/portrait.py`).
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]

COLOURS = {
    "fresh": ("🟩", (76, 175, 80)),
    "due": ("🟦", (33, 150, 243)),
    "leased": ("🟪", (156, 39, 176)),
    "waiting": ("🟨", (255, 193, 7)),
    "dead": ("🟥", (229, 57, 53)),
    "dismissed": ("🟫", (121, 85, 72)),
    "excluded": ("⬜", (224, 224, 224)),
}
PALETTE = [COLOURS[name] for name in ("dead", "due", "fresh", "waiting", "leased", "dismissed")]
OTHERS = ("⬛", (60, 60, 60))
WIDTH, BAR, CHART, MAP = 480, 24, 96, 320
EDGES = [0.1, 0.3, 1, 3, 10, 30, 60, 180, 600, 1800, 3600, 10800, 43200, 86400]


def coverage(counts: Mapping[str, int]) -> str:
    """Rows by state as one bar."""
    shown = {state: counts[state] for state in COLOURS if counts.get(state)}
    total = sum(shown.values())
    if not total:
        return "no row"
    bar = _blank(BAR, WIDTH)
    ends = np.cumsum([0, *shown.values()]) * WIDTH // total
    for state, start, end in zip(shown, ends, ends[1:], strict=False):
        bar[:, start : max(end, start + 1)] = COLOURS[state][1]
    legend = " · ".join(f"{COLOURS[state][0]} {state} {rows}" for state, rows in shown.items())
    return f"{_image('rows by state', bar)}\n\n{legend}"


def latency(seconds: Sequence[float]) -> str:
    """From enqueued to searchable, as a histogram whose steps triple."""
    if not seconds:
        return "nothing was indexed in the last day"
    counts = np.histogram(np.clip(seconds, EDGES[0], EDGES[-1]), bins=EDGES)[0]
    chart = _blank(CHART, WIDTH)
    step = WIDTH // len(counts)
    for place, height in enumerate((counts * CHART / counts.max()).astype(int)):
        chart[CHART - height :, place * step + 1 : (place + 1) * step] = COLOURS["due"][1]
    middle, late = np.percentile(seconds, [50, 95])
    return f"{_image('seconds', chart)}\n\n0.1 s … 1 day, median {middle:.1f} s, p95 {late:.1f} s, {len(seconds)} rows"


def vectors(points: NDArray[np.float64], groups: Sequence[str]) -> str:
    """A sample laid flat: near is alike. The commonest groups have colours."""
    if len(points) == 0:
        return "too few vectors"
    common = [group for group, _ in Counter(groups).most_common(len(PALETTE))]
    colours = dict(zip(common, PALETTE, strict=False))
    picture = _blank(MAP, MAP)
    for (x, y), group in zip((points * (MAP - 8) + 4).astype(int), groups, strict=True):
        picture[MAP - y - 2 : MAP - y + 2, x - 2 : x + 2] = colours.get(group, OTHERS)[1]
    legend = [f"{colours[group][0]} {_plain(group)}" for group in common]
    return f"{_image('vectors', picture)}\n\n{' · '.join([*legend, f'{OTHERS[0]} others'])}"


def _plain(text: str) -> str:
    """A value of the user's inside markdown: no word of it is an instruction to the page."""
    return "".join(letter for letter in text[:40] if letter.isalnum() or letter in " .-–&'")


def _blank(height: int, width: int) -> Pixels:
    return np.full((height, width, 3), 250, dtype=np.uint8)


def _image(title: str, pixels: Pixels) -> str:
    return f"![{title}](data:image/png;base64,{base64.b64encode(png(pixels)).decode()})"


def png(pixels: Pixels) -> bytes:
    """(height, width, 3) uint8 as a PNG file."""
    height, width, _ = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_part(name, data) for name, data in parts)


def _part(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
