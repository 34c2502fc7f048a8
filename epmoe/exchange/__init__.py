"""The exchange between the ranks of one node: memory, rounds, dispatch and combine."""
