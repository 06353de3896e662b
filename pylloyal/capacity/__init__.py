"""What fits, from headers alone. Nothing here opens the native library."""
