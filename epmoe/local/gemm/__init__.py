"""The grouped GEMMs of the experts stage. A GEMM is one object in a file of its own and a line of
`table.GEMMS`.
"""
