"""Makes the data of the supervised stage: what teachers write, and the examples that follow from it."""
