"""Output of the commands: tables, progress, plots and pages."""
