"""Loading that survives bad samples."""
