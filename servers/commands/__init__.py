"""The commands of the servers' side, one module each; they may import every other room."""
