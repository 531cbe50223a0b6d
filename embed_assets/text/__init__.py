"""From a column's value to the texts that are embedded: cleaning (`plain`, `html`, `markdown`), sections, cutting."""

from embed_assets.text.chunk import MAX_CHARACTERS, MAX_CHUNKS, Piece, check_size, chunk_id, cut, text_hash
from embed_assets.text.html import html_to_sections
from embed_assets.text.markdown import markdown_to_sections
from embed_assets.text.plain import normalise, well_formed
from embed_assets.text.sections import HeadingPaths, Section, joined, under

__all__ = [
    "MAX_CHARACTERS",
    "MAX_CHUNKS",
    "HeadingPaths",
    "Piece",
    "Section",
    "check_size",
    "chunk_id",
    "cut",
    "html_to_sections",
    "joined",
    "markdown_to_sections",
    "normalise",
    "text_hash",
    "under",
    "well_formed",
]
