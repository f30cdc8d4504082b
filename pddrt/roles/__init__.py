"""The roles of a deployment. Each talks to the others by frames over the net, and by nothing
else.
"""
