"""From stored blocks to ratios: what each block measured and how the arms compare, while a run goes on and after it."""
