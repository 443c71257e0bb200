"""Declarations: tensor specs, cases, ops and providers, and how they are found."""
