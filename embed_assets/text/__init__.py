"""From a column's value to the texts that are embedded: cleaning (`html`) and cutting (`chunk`)."""

from embed_assets.text.chunk import MAX_CHARACTERS, MAX_CHUNKS, check_size, chunk, text_hash
from embed_assets.text.html import Kind, clean, html_to_text, normalise, well_formed

__all__ = [
    "MAX_CHARACTERS",
    "MAX_CHUNKS",
    "Kind",
    "check_size",
    "chunk",
    "clean",
    "html_to_text",
    "normalise",
    "text_hash",
    "well_formed",
]
