"""Released kernels of other libraries under this project's checks: see docs/FIELD.md."""
