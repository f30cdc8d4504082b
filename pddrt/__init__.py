"""pddrt: a research runtime for cross-datacenter prefill-decode disaggregation of LLM inference."""

__version__ = "0.1.0"
