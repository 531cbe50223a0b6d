"""`python -m embed_assets` is `embed-assets`."""

from embed_assets.cli import main

main()
