"""Are the kernels right? Cases that follow from declarations, references, each op."""
