"""Servers as people write them, with FastAPI or LitServe: the baseline for better serving code and for Triton."""
