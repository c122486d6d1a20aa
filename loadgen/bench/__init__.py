"""The run context that studies measure with: warm servers, inputs, the load runner and kept answers."""
