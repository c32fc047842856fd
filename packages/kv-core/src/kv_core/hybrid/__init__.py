"""The hybrid cache: a ring of recent rows, a pool of compressed ones and keys to search it by."""
