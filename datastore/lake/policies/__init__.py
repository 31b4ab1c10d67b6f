"""Policies at rest: what one is, the package it is saved in, the named versions."""
