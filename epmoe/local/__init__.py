"""What one rank computes by itself: routing, permutation, experts, and the same on one process for
comparison.
"""
