"""A small deterministic engine behind the same core: no model file, no GPU, ready in a moment.

It is a test tool. Client authors develop against it, the conformance suite is proved on it, and nothing in it is
used by the adapters of real engines.
"""
