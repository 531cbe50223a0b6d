"""GitHub's cmark, called so that it gives its memory back: cmarkgfm frees neither the tree nor the result.

What does not belong here: what of the HTML is text (`markdown`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from threading import Lock
from typing import Any

from cmarkgfm import cmark

_ffi, _lib = cmark._cmark.ffi, cmark._cmark.lib
_free_tree = ctypes.CDLL(cmark._cmark.__file__).cmark_node_free
_free_text = ctypes.CDLL(None).free  # cmark's default allocator is the C library's
_free_tree.argtypes = _free_text.argtypes = [ctypes.c_void_p]
_free_tree.restype = _free_text.restype = None
_parsing = Lock()  # cmark keeps its extensions' special characters in one table for all threads


def to_html(markdown: str, *, options: int, extensions: Sequence[str]) -> str:
    """HTML of GitHub-flavoured Markdown, by cmark's `options` and `extensions`. Leaves no memory behind."""
    with _parsing:
        cmark.core_extensions_ensure_registered()
        parser = cmark.parser_new(options)
        try:
            for name in extensions:
                cmark.parser_attach_syntax_extension(parser, cmark.find_syntax_extension(name))
            cmark.parser_feed(parser, markdown)
            return _rendered(cmark.parser_finish(parser), options, cmark.parser_get_syntax_extensions(parser))
        finally:
            cmark.parser_free(parser)


def _rendered(tree: Any, options: int, extensions: Any) -> str:
    try:
        text = _lib.cmark_render_html(tree, options, extensions)
        try:
            return bytes(_ffi.string(text)).decode()
        finally:
            _free_text(_address(text))
    finally:
        _free_tree(_address(tree))


def _address(pointer: Any) -> int:
    return int(_ffi.cast("uintptr_t", pointer))
