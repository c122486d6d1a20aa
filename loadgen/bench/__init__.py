"""The run context: what a study measures with. Servers that are up and warm, inputs, the load runner, kept answers."""
