"""The studies: each answers one question, with its own records and analysis. A study never imports another."""
