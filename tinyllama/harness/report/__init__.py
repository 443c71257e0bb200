"""What records say: tables of text, three sentences a device, and one HTML page."""
