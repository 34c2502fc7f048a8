"""Experts that move while the group serves: plans, the balancer, moves between slots, and tables of
slots.
"""
