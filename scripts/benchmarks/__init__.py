"""Measurements of this program itself: what its parts cost, one module each, started by
`scripts/bench`. They read clocks, and so stand outside the package and its tests.
"""
