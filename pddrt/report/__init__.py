"""The page about a run, its pictures, and the trace for Perfetto."""
