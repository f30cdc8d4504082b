"""Decisions: which pipeline a request takes, when it changes hands. Pure functions of what is
known.
"""
