"""Times a candidate against its reference by paired measurements in fresh processes."""
