"""The built-in corpora."""
