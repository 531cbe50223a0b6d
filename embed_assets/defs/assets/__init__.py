"""The assets of a drain, one module per part of the chain."""
