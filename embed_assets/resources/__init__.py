"""Where Postgres and the embedder live: the only homes of leases, SKIP LOCKED and transactions."""
