"""One file per stage of the pipeline; each mirrors ``csrc/*/<stage>.*`` and ``tests/test_<stage>.py``."""
