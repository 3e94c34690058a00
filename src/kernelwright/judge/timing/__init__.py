"""Is the candidate faster? Paired measurements in fresh processes."""
