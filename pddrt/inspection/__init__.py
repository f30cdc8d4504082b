"""Looking into a recorded run: `pddrt inspect`."""
