"""Shows a run to people: the HTML page, the tables, and the words for codes."""
