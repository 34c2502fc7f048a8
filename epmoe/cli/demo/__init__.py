"""The command `epmoe run --model`: models of transformers generate text with their experts spread
over all ranks. The text must be the one that a single process generates.
"""
