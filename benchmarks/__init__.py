"""Current benchmark results, one JSON file for each measurement, and what renders BENCHMARKS.md
from them.
"""
