"""One renderer per format; each knows the document model and nothing else."""
