"""OTLP: spans of OpenTelemetry that describe calls of language models, one row for each call."""
