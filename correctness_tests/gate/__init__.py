"""The regression gate, tested."""
