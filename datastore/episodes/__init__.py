"""The data model: spaces, columns, episodes and batches, and their encoding as rows."""
