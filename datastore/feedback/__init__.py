"""Sessions: served decisions and their rewards, from the server's journal to episodes."""
