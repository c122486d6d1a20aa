"""The metrics of a run: what each block measured, the arms compared by it, and the comparisons in words."""
