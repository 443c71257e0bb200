"""What `check` promises."""
