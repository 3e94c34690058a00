"""Is the candidate right? Inputs, references, tolerances, and what the source admits to."""
