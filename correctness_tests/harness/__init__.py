"""The harness's own tests."""
