"""Measurements: clocks, rounds, memory, launches, energy, ceilings, tuning."""
