"""An embedding server over real HTTP whose vectors are made from the text's hash, and which fails on command.

It speaks `/embed` and `/info` of Text Embeddings Inference, OpenAI's `/v1/embeddings` and a Hugging Face endpoint at
`/`, so that users can rehearse their own outage (`embed-assets fake-server`) and the tests have one stand-in. What a
server may do wrong stands in `faults`, when in `endpoint`, what it says in `answers`, the HTTP of it in `server`.
"""

from embed_assets.fake_server.answers import vector_for
from embed_assets.fake_server.endpoint import Received
from embed_assets.fake_server.faults import Behaviour, Fault
from embed_assets.fake_server.server import FakeServer

__all__ = ["Behaviour", "FakeServer", "Fault", "Received", "vector_for"]
