"""One renderer for each format; each knows the document model and nothing else."""
