"""Records, tables and the page, tested."""
