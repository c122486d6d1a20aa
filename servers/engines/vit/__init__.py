"""The lean vision transformer: open_clip's weights in fewer, fatter kernels. Not in scope: text towers, training."""
