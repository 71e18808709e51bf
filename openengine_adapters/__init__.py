"""Serve the OpenEngine v1 contract over the inference engines that people already run."""

__version__ = "0.1.0"
