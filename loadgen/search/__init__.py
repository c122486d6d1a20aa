"""How a search for a rate and a ramp decide on their next trial: pure, told what was measured."""
