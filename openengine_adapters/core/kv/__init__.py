"""The KV plane: an engine's own event publishers in, typed streams with snapshot and replay out."""
