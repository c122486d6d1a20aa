"""The corpus: one module for each family of cases; `loadgen.conformance.corpus` puts them in order."""
