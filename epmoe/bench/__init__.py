"""One file per benchmark, and what it is measured against."""
