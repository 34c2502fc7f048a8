"""The exchange over several nodes: rails between the nodes, and an exchange of one node inside
each.
"""
