"""Benchmarks: one file each, and the sides that they compare."""
