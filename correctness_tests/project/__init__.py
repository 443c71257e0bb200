"""The project: set-up, command line, documents, imports."""
