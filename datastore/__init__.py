"""The lake: episodes and policies at rest, SQL and replay over them; imports no other stage."""
