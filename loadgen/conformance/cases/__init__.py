"""The corpus: one table of cases for each theme; `loadgen.conformance.corpus` puts them in order."""
