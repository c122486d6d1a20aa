"""Model specifications: tensors, preprocessing, weights, sample input. Not in scope: executing them (`engines`)."""
