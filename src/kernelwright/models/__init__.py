"""Language models behind an endpoint or in this process, and transcripts of what they said."""
