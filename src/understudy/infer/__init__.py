"""One call: key, cache, ordered sources. Knows no tensors of its own."""
