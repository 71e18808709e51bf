"""Measurements as ratios against a baseline of the same run. Nothing here is asserted."""
