"""How rows of keys and values become stored codes, and back: the numeric truth in plain torch."""
