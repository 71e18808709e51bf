"""The engine-neutral half: validation, admission, the response stream, errors, health and load.

Nothing in this package imports an engine.
"""
