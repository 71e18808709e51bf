"""The vLLM adapter. Importing this package does not import vLLM."""
