"""The life of a rank in one group after another: how ranks agree on a group, and how a rank joins
it, sleeps, wakes and leaves.
"""
