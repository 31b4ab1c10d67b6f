"""Trainers: files in the forms that the trainers of language models read."""
