"""The machine: devices, sensors, worker processes, files that are written whole."""
