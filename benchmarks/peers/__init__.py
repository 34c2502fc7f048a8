"""Drivers of other libraries, one file each, for `epmoe bench CONFIG --peers benchmarks/peers`."""
