"""One file for each stage of the pipeline.

``stages/X.py`` mirrors ``csrc/cpu/X.cpp`` and, for dispatch and combine, the folder ``csrc/cuda/X``, otherwise
``csrc/cuda/local/X.cu``. The experts are a library's and have no native file.
"""
