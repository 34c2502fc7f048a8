"""The configuration of a group: what a file says, checked, and the placement of experts that
follows from it.
"""
