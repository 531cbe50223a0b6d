"""What `dagster dev` loads: the corpora that EMBED_CORPORA names, as one project. It only assembles."""

from embed_assets.defs.build import build_definitions
from embed_assets.resources.assembly import load_registry
from embed_assets.settings import load_settings

settings = load_settings()
registry = load_registry(settings)
defs = build_definitions([registry[kind] for kind in registry.kinds], settings=settings)
