"""The configuration of a group: reads and checks what a file says, and computes from it where the
experts are placed.
"""
