"""`epmoe run --model`: models of transformers generate text over all ranks, compared with a single
process.
"""
