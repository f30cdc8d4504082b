"""The run drawn while it is under way, and a recorded one drawn again."""
