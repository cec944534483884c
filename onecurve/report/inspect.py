"""A checkpoint's manifest as a table, and its hashes checked."""
