"""Transcripts: dialogues of chat and tool use, one row a generated turn."""
