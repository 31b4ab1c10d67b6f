"""The replaylake command: parses, builds, calls one library function and prints."""
