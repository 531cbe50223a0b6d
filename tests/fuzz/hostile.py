"""Hostile texts from a seed: markup at its worst, with words between that a reader would see.

Everything that hides what follows (a comment, a script or a tag without an end) stands behind the last word.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from random import Random

from embed_assets.corpus import EscapedHtml, Html, Markdown, Plain

TAGS = re.findall(
    r"\S+",
    "div p span b i em li ul ol dl dt dd table tr td th thead tbody h1 h2 h3 h6 pre blockquote a button section "
    "article details summary form label center font nobr custom-tag x:y svg-x body html main textarea",
)
WHOLE = [
    "<script>if (a<b) { document.write('<p>no</p>') }</script>",
    "<style>p > a { content: '</p>' }</style>",
    "<!-- a -- b -->",
    "<!---->",
    "<!--[if mso]><table><tr><td>outlook</td></tr></table><![endif]-->",
    "<!--[if !mso]><!--><i></i><!--<![endif]-->",
    "<![if gte mso 9]><![endif]>",
    "<![CDATA[ x ]]>",
    "<!DOCTYPE html>",
    "<?xml version='1.0' encoding='utf-7'?>",
    "<meta charset='utf-16'>",
    "<template><p>no</p></template>",
    "<noscript>no</noscript>",
    "<svg><text>no</text></svg>",
    "<iframe srcdoc='<p>no</p>'></iframe>",
    "<img alt='<b>' src='data:image/png;base64,AAAA'>",
    "<p onclick=x onclick='y' a=b/c 'd' \"e\">",
    "<a href=javascript:alert(1)//>",
    "<br/><br / ><hr/>",
    "<input value='no'>",
    "</>",
    "</br>",
]
ENTITIES = re.findall(
    r"\S+", "&amp; &nbsp &nbsp; &#x1F600; &#0; &#xD800; &#99999999999; &bogus; &&& &#; &#x; &lt; &amp;lt; &shy; &#8203;"
)
MARKDOWN = [
    "# ",
    "\n## ",
    "\n- ",
    "\n1. ",
    "\n> ",
    "\n\n    ",
    "**",
    "_",
    "`",
    "~~",
    "[t](u)",
    "![",
    "| a | b |",
    "\n---\n",
]
ODD = [
    "\0",
    "\ud800",
    "\udc00\ud83d",
    "\u202e",
    "\u2066",
    "\u200b\u200d",
    "\ufeff",
    "\x1c\x1d\x1e\x1f",
    "\r\n",
    "\v\f",
    "e" + "\u0301" * 50,
    "👨\u200d👩\u200d👧",
    "🇩🇪🇫🇷",
    "汉字。",
    "سؤال؟ ",
    "é".encode().decode("latin-1"),
    b"\xff\xfe\x80caf\xe9".decode("utf-8", "surrogateescape"),
    "\U0010ffff",
    "\uffff",
]
HIDING = [
    "<!-- ",
    "<script> ",
    "<style>",
    "<a href='",
    "<div a=b",
    "<![CDATA[",
    "<!x",
    "</div",
    "<textarea><!--",
    "&#",
    "<",
]
KINDS = [Html, EscapedHtml, Markdown, Plain]


@dataclass(frozen=True)
class Hostile:
    """A value of a column of `kind`, and the words that must be in its text, in order."""

    kind: type[Plain]
    value: str
    words: list[str]


def hostile(seed: int) -> Hostile:
    """One in twenty-five is of some hundred thousand characters."""
    random = Random(seed)
    kind = KINDS[seed % len(KINDS)]
    most = 20_000 if seed % 25 == 0 else 40
    parts: list[str] = []
    words: list[str] = []
    for number in range(random.randint(1, 30)):
        words.append(f"w{number}x")
        parts += [_nonsense(random, kind, most), f" {words[-1]} "]
    parts.append(random.choice(["", _nonsense(random, kind, most), random.choice(HIDING) * random.randint(1, most)]))
    value = "".join(parts)
    return Hostile(kind, html.escape(value) if kind is EscapedHtml else value, words)


def _nonsense(random: Random, kind: type[Plain], most: int) -> str:
    """Complete in itself; many times over, or much of the same, now and then."""
    tag = random.choice(TAGS)
    makers = [
        lambda: f"<{tag}>",
        lambda: f"</{tag}>",
        lambda: f"<{tag} title='a > b' data-x=\"{'y' * random.randint(0, most)}\">",
        lambda: f"<{tag.upper()}{' ' if kind is Markdown else chr(10)}>",  # Markdown would begin a quotation
        lambda: random.choice(WHOLE),
        lambda: random.choice(ENTITIES),
        lambda: random.choice(ODD),
        lambda: random.choice(MARKDOWN) if kind in (Markdown, Plain) else " < ",
        lambda: f"<{tag}>" * random.choice([1, 3, 300, most]),
        lambda: " " + random.choice("aß汉") * random.choice([1, 50, 3000, 5 * most]) + " ",
        lambda: "".join(chr(random.randrange(0x20, 0x3000)) for _ in range(random.randint(0, 8))).translate(_NO_MARKUP),
    ]
    part = "".join(random.choice(makers)() for _ in range(random.randint(0, 4)))
    repeat = random.randint(1, most) if random.random() < 0.1 else 1
    return part * min(repeat, 1 + 50_000 // (len(part) + 1))


_NO_MARKUP = str.maketrans(dict.fromkeys("<>&[]()`'\"\\!", " "))
