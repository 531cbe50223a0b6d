"""From texts to vectors: in this process (`local`) or over HTTP (`client`), behind one interface (`types`)."""

from embed_assets.embedding.client import HttpEmbedder
from embed_assets.embedding.local import LocalEmbedder
from embed_assets.embedding.types import Embedded, Embedder, Rejected, Vectors

__all__ = ["Embedded", "Embedder", "HttpEmbedder", "LocalEmbedder", "Rejected", "Vectors"]
