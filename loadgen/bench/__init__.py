"""What a study measures with: servers that are up, warmed inputs, the load runner, the answers that are compared."""
