"""The demo: 84 postings written for it, in six languages and with the mess that real HTML brings."""
