"""One question each: its records, its analysis. A study never imports another."""
